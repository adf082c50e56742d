/* Memory of a simulation, and heaps of requests. */
#ifndef FP8PLAN_MEMORY_H
#define FP8PLAN_MEMORY_H

#include "state.h"

/* ---- memory ---- */

static number least(number a, number b) { return a < b ? a : b; }
static number most(number a, number b) { return a > b ? a : b; }

static void fail(State *s, number failure) {
    s->failure = failure;
    longjmp(s->failed, 1);
}

static void *grown(State *s, void *old, number count, size_t size) {
    void *block = realloc(old, (size_t)most(count, 1) * size);
    if (!block) fail(s, NO_MEMORY);
    return block;
}

/* An array of zeros that lives as long as the simulation. */
static void *zeros(State *s, number count, size_t size) {
    if (s->num_owned == s->owned_room)
        s->owned = grown(s, s->owned, s->owned_room = 2 * s->owned_room + 64, sizeof(void *));
    void *block = calloc((size_t)most(count, 1), size);
    if (!block) fail(s, NO_MEMORY);
    return s->owned[s->num_owned++] = block;
}

static number *numbers(State *s, number count, number value) {
    number *values = zeros(s, count, sizeof(number));
    for (number i = 0; value && i < count; i++) values[i] = value;
    return values;
}

static Span *new_span(State *s, number start, number end, number holders) {
    enum { AT_ONCE = 256 };
    if (!s->unused) {
        Span *more = zeros(s, AT_ONCE, sizeof(Span));
        for (number i = 0; i < AT_ONCE; i++) {
            more[i].newer = s->unused;
            s->unused = more + i;
        }
    }
    Span *span = s->unused;
    s->unused = span->newer;
    *span = (Span){start, end, holders, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    return span;
}

static void drop_span(State *s, Span *span) {
    span->newer = s->unused;
    s->unused = span;
}

/* ---- heaps ---- */

static Heap new_heap(State *s) {
    number n = s->requests;
    return (Heap){numbers(s, n, 0), numbers(s, n, 0), numbers(s, n, NONE), 0};
}

static void put(Heap *heap, number at, number request) {
    heap->items[at] = request;
    heap->place[request] = at;
}

static void sift(Heap *heap, number at, number request) {
    const number *key = heap->key;
    while (at && key[request] < key[heap->items[(at - 1) / 2]]) {
        put(heap, at, heap->items[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (number child; (child = 2 * at + 1) < heap->size; at = child) {
        if (child + 1 < heap->size && key[heap->items[child + 1]] < key[heap->items[child]]) child++;
        if (key[request] < key[heap->items[child]]) break;
        put(heap, at, heap->items[child]);
    }
    put(heap, at, request);
}

/* Enter a request under a step. Those of one step come in order of arrival. */
static void enter(const State *s, Heap *heap, number request, number step) {
    heap->key[request] = step * s->num_turns + s->rank[request];
    sift(heap, heap->place[request] == NONE ? heap->size++ : heap->place[request], request);
}

static void leave(Heap *heap, number request) {
    number at = heap->place[request];
    if (at == NONE) return;
    heap->place[request] = NONE;
    number moved = heap->items[--heap->size];
    if (moved != request) sift(heap, at, moved);
}

/* True if the first entry is under a step before `end`. */
static int comes_before(const State *s, const Heap *heap, number end) {
    return heap->size && heap->key[heap->items[0]] < end * s->num_turns;
}

/* The step of the first entry; NEVER without one. */
static number first_step(const State *s, const Heap *heap) {
    return heap->size ? heap->key[heap->items[0]] / s->num_turns : NEVER;
}

#endif
