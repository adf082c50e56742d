/* vLLM's scheduler for one group of full attention: the rules of `GroupState` in group_state.py, in C.

   Every number is the same as the reference's; tests/model/schedule/test_scheduler.py compares the two. A span is
   consecutive hashed blocks [start, end) that are held and freed together. Eviction lowers `end`: a request frees its
   last block before its first. Finish steps are in a heap that a preempted request leaves at once.
*/
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t number;
enum { /* state.ROW and state.PREFILL */
    STEPS, DECODE_REQUESTS, DECODE_KV_TOKENS, RECOMPUTED_TOKENS, RUNNING, WAITING, USED_BLOCKS, PREEMPTIONS, FINISHED,
    PREFILL_TOKENS, PREFILL_REQUESTS, PREFILL_KV_TOKENS, PREFILL_PAIRS, SAMPLED_REQUESTS, CACHED_TOKENS, COLUMNS
};
enum { QUEUE = 0, NONE = -1 }; /* span 0 is both ends of the queue of free spans */

typedef struct {
    number start, end, holders;
    number earlier, later; /* neighbours in the queue; NONE: it is not in the queue */
    number older, newer;   /* of the copies of one content; NONE at the ends */
    number copy_of;        /* the group of requests whose copy it is; NONE: it is no copy */
} Span;

typedef struct { number request, before, after; } Chunk;

typedef struct {
    number num_blocks, block_size, caching, max_num_batched_tokens, max_num_seqs, reserve_full_prompt, lag, longest;
} Settings;

typedef struct {
    jmp_buf failed;
    Settings settings;
    number requests;
    /* the pool */
    const number *group, *shared_blocks, *has_copy;
    number free, clean;
    Span *spans; /* the queue, those shared by each group, the private ones of each request, and copies */
    number shared, private, used_spans, room;
    number unused; /* the first of the spans to use again, linked by `newer` */
    number *oldest, *newest, *held_copy, *has_private;
    /* the scheduler */
    number now, waiting, running, head, head_needs, decoding, context, least_free, preemptions, lost, hit_freed_blocks;
    number partial, partial_computed; /* partial: NONE or a request */
    number *final, *known, *offset, *before, *after, *in_phase;
    number *finish_of, *heap, *place, finishing; /* place: of a request in the heap, or NONE */
    number *finished, num_finished, *leaving, num_leaving;
    number *ended; /* the row that ended a request, for the caller */
    Chunk *chunks;
    number num_chunks;
    number *rows, num_rows, rows_room;
} State;

static void *memory(State *s, void *old, number count, size_t size) {
    void *block = realloc(old, (size_t)(count > 0 ? count : 1) * size);
    if (!block) longjmp(s->failed, 1);
    return block;
}

static number *numbers(State *s, number count, number value) {
    number *values = memory(s, NULL, count, sizeof(number));
    for (number i = 0; i < count; i++) values[i] = value;
    return values;
}

static number blocks_for(const State *s, number tokens) {
    return (tokens + s->settings.block_size - 1) / s->settings.block_size;
}

static number phase_of(const State *s, number offset) {
    number phase = -offset % s->settings.block_size;
    return phase < 0 ? phase + s->settings.block_size : phase;
}

/* ---- the pool ---- */

static void enqueue(State *s, number span) {
    Span *spans = s->spans;
    spans[span].earlier = spans[QUEUE].earlier;
    spans[span].later = QUEUE;
    spans[spans[span].earlier].later = span;
    spans[QUEUE].earlier = span;
    s->free += spans[span].end - spans[span].start;
}

static void dequeue(State *s, number span) {
    Span *spans = s->spans;
    spans[spans[span].earlier].later = spans[span].later;
    spans[spans[span].later].earlier = spans[span].earlier;
    spans[span].earlier = NONE;
}

static void hold(State *s, number span) {
    Span *held = &s->spans[span];
    if (!held->holders && held->earlier != NONE) {
        dequeue(s, span);
        s->free -= held->end - held->start;
    }
    held->holders++;
}

static void let_go(State *s, number span) {
    Span *held = &s->spans[span];
    if (!--held->holders && held->end > held->start) enqueue(s, span);
}

static number new_copy(State *s, number group, number start) {
    number span = s->unused;
    if (span != NONE) {
        s->unused = s->spans[span].newer;
    } else {
        if (s->used_spans == s->room) s->spans = memory(s, s->spans, s->room *= 2, sizeof(Span));
        span = s->used_spans++;
    }
    s->spans[span] = (Span){start, start + 1, 1, NONE, NONE, s->newest[group], NONE, group};
    if (s->newest[group] == NONE) s->oldest[group] = span;
    else s->spans[s->newest[group]].newer = span;
    return s->newest[group] = span;
}

static void drop_copy(State *s, number span) {
    Span *copy = &s->spans[span];
    if (copy->older == NONE) s->oldest[copy->copy_of] = copy->newer;
    else s->spans[copy->older].newer = copy->newer;
    if (copy->newer == NONE) s->newest[copy->copy_of] = copy->older;
    else s->spans[copy->newer].older = copy->older;
    copy->newer = s->unused;
    s->unused = span;
}

static number lookup(const State *s, number request, number tokens, number *in_queue) {
    *in_queue = 0;
    if (!s->settings.caching) return 0;
    number most = (tokens - 1) / s->settings.block_size, group = s->group[request];
    const Span *shared = &s->spans[s->shared + group];
    number hit = shared->end > most ? most : shared->end;
    *in_queue = shared->holders ? 0 : hit;
    if (hit < s->shared_blocks[request]) return hit;
    if (s->has_copy[request]) {
        if (s->oldest[group] == NONE || most <= hit) return hit;
        hit++;
        if (!s->spans[s->oldest[group]].holders) ++*in_queue;
    }
    if (s->has_private[request]) {
        const Span *private = &s->spans[s->private + request];
        hit += private->end - private->start;
        *in_queue += private->end - private->start;
    }
    return hit;
}

static void admit(State *s, number request, number hit_blocks) {
    if (!s->settings.caching) return;
    number blocks = s->shared_blocks[request];
    hold(s, s->shared + s->group[request]);
    if (s->has_copy[request] && hit_blocks > blocks) {
        hold(s, s->held_copy[request] = s->oldest[s->group[request]]);
        blocks++;
    }
    if (s->has_private[request]) {
        s->has_private[request] = 0;
        if (hit_blocks > blocks) hold(s, s->private + request);
    }
}

static void take(State *s, number blocks) {
    s->free -= blocks;
    if (!s->settings.caching) return;
    s->clean -= blocks;
    while (s->clean < 0) {
        number span = s->spans[QUEUE].later;
        if (span == QUEUE) longjmp(s->failed, 1);
        Span *oldest = &s->spans[span];
        number size = oldest->end - oldest->start;
        if (size + s->clean > 0) {
            oldest->end += s->clean;
            s->clean = 0;
        } else {
            s->clean += size;
            oldest->end = oldest->start;
            dequeue(s, span);
            if (oldest->copy_of != NONE) drop_copy(s, span);
        }
    }
}

static void computed(State *s, number request, number tokens) {
    if (!s->settings.caching) return;
    number full = tokens / s->settings.block_size, shared_blocks = s->shared_blocks[request];
    Span *shared = &s->spans[s->shared + s->group[request]];
    if (shared->end < shared_blocks) {
        number end = full < shared_blocks ? full : shared_blocks;
        if (end > shared->end) shared->end = end;
    }
    if (s->has_copy[request] && s->held_copy[request] == NONE && full > shared_blocks)
        s->held_copy[request] = new_copy(s, s->group[request], shared_blocks);
}

static void release(State *s, number request, number held_blocks, number hashed_tokens) {
    if (!s->settings.caching) {
        s->free += held_blocks;
        return;
    }
    number full = hashed_tokens / s->settings.block_size, start = s->shared_blocks[request] + s->has_copy[request];
    s->clean += held_blocks - full;
    s->free += held_blocks - full;
    if (full > start) {
        Span *private = &s->spans[s->private + request];
        if (private->earlier != NONE) longjmp(s->failed, 1); /* it would be twice in the queue */
        *private = (Span){start, full, 0, NONE, NONE, NONE, NONE, NONE};
        s->has_private[request] = 1;
        enqueue(s, s->private + request);
    }
    if (s->held_copy[request] != NONE) {
        let_go(s, s->held_copy[request]);
        s->held_copy[request] = NONE;
    }
    let_go(s, s->shared + s->group[request]);
}

/* ---- the heap of finish steps ---- */

static void put(State *s, number at, number request) {
    s->heap[at] = request;
    s->place[request] = at;
}

static void sift(State *s, number at, number request) {
    while (at && s->finish_of[request] < s->finish_of[s->heap[(at - 1) / 2]]) {
        put(s, at, s->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (number child; (child = 2 * at + 1) < s->finishing; at = child) {
        if (child + 1 < s->finishing && s->finish_of[s->heap[child + 1]] < s->finish_of[s->heap[child]]) child++;
        if (s->finish_of[request] < s->finish_of[s->heap[child]]) break;
        put(s, at, s->heap[child]);
    }
    put(s, at, request);
}

static void leave_heap(State *s, number request) {
    number at = s->place[request], last = s->heap[--s->finishing];
    if (last != request) sift(s, at, last);
}

/* ---- the scheduler ---- */

static void start_decoding(State *s, number request, number tokens) {
    number offset = tokens - s->now;
    s->offset[request] = offset;
    s->decoding++;
    s->context += tokens;
    s->finish_of[request] = (s->final[request] - offset - 1) * s->requests + request;
    sift(s, s->finishing++, request);
    s->in_phase[phase_of(s, offset)]++;
}

static number stop_decoding(State *s, number request) {
    number tokens = s->now + s->offset[request];
    s->in_phase[phase_of(s, s->offset[request])]--;
    s->decoding--;
    s->context -= tokens;
    leave_heap(s, request);
    return tokens;
}

static void remove_request(State *s, number request, number in_flight) {
    s->after[s->before[request]] = s->after[request];
    s->before[s->after[request]] = s->before[request];
    s->running--;
    release(s, request, blocks_for(s, s->final[request]), s->final[request] - in_flight);
}

static void set_head_needs(State *s, number blocks) {
    s->head_needs = s->settings.reserve_full_prompt ? blocks - 1 : 0;
}

static void preempt_last(State *s) {
    number request = s->before[s->head];
    for (number i = 0; i < s->num_leaving; i++)
        if (s->leaving[i] == request) {
            memmove(s->leaving + i, s->leaving + i + 1, (size_t)(--s->num_leaving - i) * sizeof(number));
            remove_request(s, request, s->final[request] > s->known[request]);
            return;
        }
    number tokens;
    if (s->partial == request) {
        tokens = s->partial_computed;
        s->partial = NONE;
    } else {
        tokens = stop_decoding(s, request);
    }
    s->running--;
    s->waiting++;
    s->head = request;
    s->lost += tokens;
    number free_before = s->free;
    release(s, request, blocks_for(s, tokens), tokens - (s->settings.lag && tokens > s->known[request]));
    if (tokens >= s->known[request]) s->known[request] = tokens + 1;
    set_head_needs(s, s->free - free_before);
}

static number serve_decoding(State *s) {
    number phase = s->now % s->settings.block_size, served = 0, preemptions = 0, wanting;
    while ((wanting = s->in_phase[phase] - served) > s->free) {
        if (s->free) {
            served += s->free;
            take(s, s->free);
        }
        preempt_last(s);
        preemptions++;
    }
    if (wanting) take(s, wanting);
    return preemptions;
}

static void record(State *s, number steps, number requests, number kv_tokens, number cached) {
    if (s->num_rows == s->rows_room)
        s->rows = memory(s, s->rows, (s->rows_room = 2 * s->rows_room + 1024), COLUMNS * sizeof(number));
    number *row = s->rows + COLUMNS * s->num_rows++;
    memset(row, 0, COLUMNS * sizeof(number));
    row[STEPS] = steps;
    row[DECODE_REQUESTS] = row[SAMPLED_REQUESTS] = requests;
    row[DECODE_KV_TOKENS] = kv_tokens;
    row[RECOMPUTED_TOKENS] = s->lost;
    row[RUNNING] = s->running;
    row[WAITING] = s->waiting;
    row[USED_BLOCKS] = s->settings.num_blocks - s->free;
    row[PREEMPTIONS] = s->preemptions;
    s->preemptions = s->lost = 0;
    for (number i = 0; i < s->num_chunks; i++) {
        number before = s->chunks[i].before, after = s->chunks[i].after;
        row[PREFILL_TOKENS] += after - before;
        row[PREFILL_KV_TOKENS] += after;
        row[PREFILL_PAIRS] += (after - before) * (after + before + 1) / 2;
    }
    row[PREFILL_REQUESTS] = s->num_chunks;
    row[SAMPLED_REQUESTS] += s->num_chunks - (s->num_chunks && s->partial != NONE);
    row[CACHED_TOKENS] = cached;
}

static void end(State *s, number steps, number preemptions, number cached) {
    number decoding = s->decoding, context = s->context;
    if (s->free < s->least_free) s->least_free = s->free;
    s->preemptions += preemptions;
    s->now += steps;
    s->context += steps * decoding;
    if (decoding || s->num_chunks) record(s, steps, decoding, context + decoding, cached);
    for (number i = 0; i < s->num_chunks - (s->partial != NONE); i++)
        start_decoding(s, s->chunks[i].request, s->known[s->chunks[i].request]);
    s->num_chunks = s->num_finished = 0;
    while (s->finishing && s->finish_of[s->heap[0]] < s->now * s->requests) {
        number request = s->heap[0];
        stop_decoding(s, request);
        s->ended[request] = s->num_rows - 1;
        s->finished[s->num_finished++] = request;
    }
    if (s->num_finished) s->rows[COLUMNS * (s->num_rows - 1) + FINISHED] = s->num_finished;
    if (s->settings.lag) { /* the scheduler does not know of these yet */
        number *gone = s->leaving, num_gone = s->num_leaving;
        s->leaving = s->finished, s->num_leaving = s->num_finished;
        s->finished = gone, s->num_finished = num_gone;
    }
    for (number i = 0; i < s->num_finished; i++) remove_request(s, s->finished[i], 0);
}

static void decode(State *s) {
    number size = s->settings.block_size, phase = s->now % size, decoding = s->decoding;
    if (s->in_phase[phase] > s->free || !decoding) {
        end(s, 1, serve_decoding(s), 0);
        return;
    }
    number wanted = s->num_leaving ? 1 : s->finish_of[s->heap[0]] / s->requests - s->now + 1, steps = 0, blocks = 0;
    if (wanted > s->settings.longest) wanted = s->settings.longest;
    if (wanted >= size && s->free >= decoding) {
        number cycles = s->free / decoding < wanted / size ? s->free / decoding : wanted / size;
        steps = cycles * size;
        blocks = cycles * decoding;
    }
    while (steps < wanted && blocks + s->in_phase[phase] <= s->free) {
        blocks += s->in_phase[phase];
        steps++;
        phase = phase + 1 == size ? 0 : phase + 1;
    }
    take(s, blocks);
    end(s, steps, 0, 0);
}

static number admissible(State *s, number request, number budget, number *hit, number *after) {
    number known = s->known[request], size = s->settings.block_size, from_queue;
    *hit = lookup(s, request, known, &from_queue);
    *after = *hit * size + budget;
    if (*after > known) *after = known;
    number needed = blocks_for(s, s->settings.reserve_full_prompt ? known : *after) - *hit + from_queue;
    number spare = s->free - needed;
    if (spare < s->least_free) s->least_free = spare;
    if (from_queue) s->hit_freed_blocks = 1;
    if (spare < 0) set_head_needs(s, needed);
    return spare >= 0;
}

static number may_admit(State *s) {
    number hit, after;
    if (s->partial != NONE) return 1;
    if (!s->waiting || s->free < s->head_needs || s->running >= s->settings.max_num_seqs) return 0;
    return admissible(s, s->head, s->settings.max_num_batched_tokens - s->decoding, &hit, &after);
}

static void compute(State *s, number request, number before, number after, number blocks) {
    take(s, blocks);
    computed(s, request, after);
    s->partial = after < s->known[request] ? request : NONE;
    s->partial_computed = after;
    s->chunks[s->num_chunks++] = (Chunk){request, before, after};
}

static void step(State *s) {
    number preemptions = serve_decoding(s), cached = 0, hit, after;
    number budget = s->settings.max_num_batched_tokens - s->decoding;
    if (s->partial != NONE && budget) {
        number request = s->partial, before = s->partial_computed;
        after = s->known[request] < before + budget ? s->known[request] : before + budget;
        number blocks = blocks_for(s, after) - blocks_for(s, before);
        if (blocks > s->free) {
            preempt_last(s);
            preemptions++;
        } else {
            budget -= after - before;
            compute(s, request, before, after, blocks);
        }
    }
    while (s->waiting && budget && !preemptions && s->running < s->settings.max_num_seqs) {
        number request = s->head;
        if (!admissible(s, request, budget, &hit, &after)) break;
        s->head = s->after[request];
        s->head_needs = 0;
        s->waiting--;
        s->running++;
        admit(s, request, hit);
        number before = hit * s->settings.block_size;
        cached += before;
        budget -= after - before;
        compute(s, request, before, after, blocks_for(s, after) - hit);
    }
    end(s, 1, preemptions, cached);
}

static void begin(State *s, const number *prompts, const number *responses, number groups) {
    number n = s->requests;
    s->free = s->clean = s->least_free = s->settings.num_blocks;
    s->shared = 1;
    s->private = s->shared + groups;
    s->used_spans = s->room = s->private + n;
    s->spans = memory(s, NULL, s->room, sizeof(Span));
    for (number i = 0; i < s->room; i++) s->spans[i] = (Span){0, 0, 0, NONE, NONE, NONE, NONE, NONE};
    s->spans[QUEUE].earlier = s->spans[QUEUE].later = QUEUE;
    s->unused = s->partial = NONE;
    s->oldest = numbers(s, groups, NONE);
    s->newest = numbers(s, groups, NONE);
    s->held_copy = numbers(s, n, NONE);
    s->has_private = numbers(s, n, 0);
    s->final = numbers(s, n, 0);
    s->known = numbers(s, n, 0);
    s->offset = numbers(s, n, 0);
    s->before = numbers(s, n + 1, 0);
    s->after = numbers(s, n + 1, 0);
    s->in_phase = numbers(s, s->settings.block_size, 0);
    s->finish_of = numbers(s, n, NONE);
    s->heap = numbers(s, n, 0);
    s->place = numbers(s, n, NONE);
    s->finished = numbers(s, n, 0);
    s->leaving = numbers(s, n, 0);
    s->chunks = memory(s, NULL, n, sizeof(Chunk));
    s->waiting = n;
    for (number i = 0; i < n; i++) {
        s->final[i] = prompts[i] + responses[i] - 1;
        s->known[i] = prompts[i];
    }
    for (number i = 0; i <= n; i++) {
        s->before[i] = i ? i - 1 : n;
        s->after[i] = i < n ? i + 1 : 0;
    }
}

/* Copy the result of fp8plan_schedule to the array `columns` of shape (COLUMNS, num_rows), and free it. */
void fp8plan_columns(number *rows, number num_rows, number *columns) {
    for (number start = 0; start < num_rows; start += 64) /* few enough rows for the CPU's cache */
        for (number column = 0; column < COLUMNS; column++)
            for (number row = start; row < num_rows && row < start + 64; row++)
                columns[column * num_rows + row] = rows[row * COLUMNS + column];
    free(rows);
}

/* Simulate a batch. Returns the number of rows; -1 without memory, or if the state contradicts itself.

   group:          of each request; requests of one group share a prompt
   results:        receives least_free and hit_freed_blocks
   ended:          receives the row that ended each request
   rows:           receives the columns of state.ROW and state.PREFILL row by row, for fp8plan_columns */
number fp8plan_schedule(number requests, number groups, const number *prompts, const number *responses,
                        const number *group, const number *shared_blocks, const number *has_copy,
                        const Settings *settings, number *results, number *ended, number **rows) {
    State *s = calloc(1, sizeof(State));
    volatile number num_rows = -1;
    if (!s) return num_rows;
    s->settings = *settings;
    s->requests = requests;
    s->ended = ended;
    s->group = group, s->shared_blocks = shared_blocks, s->has_copy = has_copy;
    if (!setjmp(s->failed)) {
        begin(s, prompts, responses, groups);
        while (s->waiting > 0 || s->running > 0) {
            if (may_admit(s)) step(s);
            else decode(s);
        }
        num_rows = s->num_rows;
        results[0] = s->least_free, results[1] = s->hit_freed_blocks;
    }
    void *owned[] = {s->spans, s->oldest, s->newest, s->held_copy, s->has_private, s->final, s->known, s->offset,
                     s->before, s->after, s->in_phase, s->finish_of, s->heap, s->place, s->finished, s->leaving,
                     s->chunks};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    if (num_rows < 0) free(s->rows);
    else *rows = s->rows;
    free(s);
    return num_rows;
}
