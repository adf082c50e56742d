/* Free blocks. Those with a hash stand in a queue (vllm/v1/core/block_pool.py, `free_blocks` and `get_new_blocks`). */
#ifndef FP8PLAN_FREE_BLOCKS_H
#define FP8PLAN_FREE_BLOCKS_H

#include "memory.h"

static void enqueue(State *s, Span *span) {
    span->earlier = s->queue.earlier;
    span->later = &s->queue;
    span->earlier->later = s->queue.earlier = span;
    s->free += span->end - span->start;
    s->changes++;
}

static void dequeue(Span *span) {
    span->earlier->later = span->later;
    span->later->earlier = span->earlier;
    span->earlier = span->later = NULL;
}

static void free_clean(State *s, number blocks) {
    s->free += blocks;
    s->clean += blocks;
    s->changes++;
}

/* Let the blocks of a span be found: the newest copy of them, or the oldest. */
static void add_copy(Content *content, Span *span, int oldest) {
    Span *older = oldest ? NULL : content->last, *newer = oldest ? content->first : NULL;
    span->content = content;
    span->older = older, span->newer = newer;
    *(older ? &older->newer : &content->first) = span;
    *(newer ? &newer->older : &content->last) = span;
    for (number block = span->start; content->oldest && block < span->end; block++)
        if (!content->oldest[block]) content->oldest[block] = span;
}

static void remove_copy(Span *span) {
    *(span->older ? &span->older->newer : &span->content->first) = span->newer;
    *(span->newer ? &span->newer->older : &span->content->last) = span->older;
}

/* Forget a span that holds no block. */
static void forget(State *s, Span *span) {
    remove_copy(span);
    if (span->front) span->front->rest = span->rest;
    if (span->rest) span->rest->front = span->front;
    dequeue(span);
    drop_span(s, span);
}

static int covers(const Span *span, number block) { return span->start <= block && block < span->end; }

/* Note that the copy of a block in a span is evicted. */
static void lose(const Span *span, number block) {
    Content *content = span->content;
    if (content->oldest[block] != span) return;
    Span *next = span->newer;
    while (next && !covers(next, block)) next = next->newer;
    content->oldest[block] = next;
    content->lost[block] = content->any_lost = 1;
}

/* Evict up to so many blocks of the span that was freed first, its last block first. */
static number evict(State *s, number blocks) {
    Span *span = s->queue.later;
    if (span == &s->queue) fail(s, NO_MEMORY); /* the counts contradict each other */
    number gone = least(blocks, span->end - span->start);
    for (number i = 1; span->content->oldest && i <= gone; i++) lose(span, span->end - i);
    span->end -= gone;
    if (span->end == span->start) forget(s, span);
    return gone;
}

/* Hand out blocks: those without a hash first, then those that were freed first. */
static void hand_out(State *s, number blocks) {
    if (!blocks) return;
    s->changes++;
    s->free -= blocks;
    s->clean -= blocks;
    while (s->clean < 0) s->clean += evict(s, -s->clean);
}

static void let_go(State *s, Span *span) {
    if (--span->holders) return;
    if (span->content) {
        enqueue(s, span);
    } else {
        free_clean(s, span->end - span->start);
        drop_span(s, span);
    }
}

static void hold(State *s, Span *span) {
    if (span->holders++) return;
    dequeue(span);
    s->free -= span->end - span->start;
}

/* Split a span before block `at`, and return the part behind. If it is free, that would be evicted first. */
static Span *split(State *s, Span *span, number at) {
    Span *rest = new_span(s, at, span->end, span->holders);
    Content *content = span->content;
    span->end = at;
    rest->content = content;
    rest->older = span;
    rest->newer = span->newer;
    *(rest->newer ? &rest->newer->older : &content->last) = span->newer = rest;
    rest->front = span;
    rest->rest = span->rest;
    if (rest->rest) rest->rest->front = rest;
    span->rest = rest;
    if (span->earlier) {
        rest->earlier = span->earlier;
        rest->later = span;
        rest->earlier->later = span->earlier = rest;
    }
    for (number block = at; content->oldest && block < rest->end; block++)
        if (content->oldest[block] == span) content->oldest[block] = rest;
    return rest;
}

/* Let the free blocks of a content from block `first` on be found no more. They wait for eviction where they are. */
static void hide(State *s, Content *content, number first, Content *gone) {
    for (Span *span = content->first, *next; span; span = next) {
        if (span->start < first && first < span->end) split(s, span, first);
        next = span->newer;
        if (span->start < first) continue;
        remove_copy(span);
        add_copy(gone, span, 0);
    }
}

/* Take the blocks [start, end) out of a free span. The rest stays where it is in the queue. */
static void cut_out(State *s, Span *span, number start, number end) {
    if (end < span->end) split(s, span, end);
    if (start > span->start) span = split(s, span, start);
    s->free -= end - start;
    forget(s, span);
}

#endif
