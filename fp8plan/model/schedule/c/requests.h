/* Requests between waiting, prefill, decoding and finished, and their admission (state.State;
   vllm/v1/core/sched/scheduler.py).
*/
#ifndef FP8PLAN_REQUESTS_H
#define FP8PLAN_REQUESTS_H

#include "client.h"
#include "rhythm.h"
#include "windows.h"

static void note_free(State *s, number blocks) { s->facts->least_free = least(s->facts->least_free, blocks); }

/* ---- chunks that end where a state can be kept (`_mamba_block_aligned_split`) ---- */

/* The tokens of a request's prefill, as vLLM counts them if it resumes. */
static number prefill_end(const State *s, number request) {
    return most(s->prompts[request], s->length[request] - 1);
}

/* True if kernels keep the state of the last whole block inside a chunk (is_mamba_prefill_checkpoint_valid). */
static int covers_block(const State *s, number start, number end) {
    number size = s->aligned;
    return s->checkpoints && start % size == 0 && start + size <= (end - 1) / size * size;
}

/* True if a chunk keeps a state inside, which takes a block (MambaManager._needs_internal_checkpoint). */
static int has_checkpoint(const State *s, number request, number start, number end) {
    if (!covers_block(s, start, end)) return 0;
    return s->settings.retain_all || end >= prefill_end(s, request);
}

/* The tokens of a chunk, cut to end where a state can be kept. */
static number whole_blocks(const State *s, number request, number start, number tokens) {
    if (!s->aligned) return tokens;
    number size = s->aligned, last = prefill_end(s, request), junction = s->junction[request];
    if (start >= last) return tokens;
    number end = start + tokens;
    int whole_prefill = end >= last && covers_block(s, start, last);
    if (end < last) {
        number whole = end / size * size;
        if (whole > start || size <= s->settings.max_num_batched_tokens) end = whole;
    }
    number stops[3] = {NONE, NONE, NONE}, first = end;
    if (!whole_prefill) stops[0] = (s->length[request] - s->settings.leaves_one) / size * size;
    if (start % size) stops[1] = (start / size + 1) * size;
    if (start < junction && junction < end) stops[2] = start + (junction - start) / size * size;
    for (int i = 0; i < 3; i++)
        if (start < stops[i] && stops[i] < end) first = least(first, stops[i]);
    return most(first - start, 0);
}

/* ---- between waiting, prefill, decoding and finished ---- */

/* The number of tokens of a running request whose full blocks have a hash by now. */
static number hashed_tokens(const State *s, number request) {
    if (s->steady[request])
        return s->now + s->offset[request] - (s->settings.lag && s->now > s->steady_from[request]);
    if (s->settings.lag && s->last_step[request] == s->now - 1) return s->hashed[request];
    return s->computed[request];
}

static void start_decoding(State *s, number request, number computed) {
    s->steady[request] = 1;
    s->unsteady--;
    s->decoding++;
    s->context += computed;
    s->steady_from[request] = s->now;
    for (number i = 0; i < s->num_meters; i++) start_reading(s, s->meters + i, request, computed);
    start_rhythm(s, request, s->now, computed, s->settings.lag ? s->last_tokens[request] : 0);
    enter(s, &s->finishes, request, s->final[request] - s->offset[request] - 1);
}

/* Stop the decoding of a request, and return the tokens that it has computed. */
static number stop_decoding(State *s, number request) {
    number computed = s->now + s->offset[request];
    s->steady[request] = 0;
    s->decoding--;
    s->context -= computed;
    leave(&s->finishes, request);
    for (number i = 0; i < s->num_meters; i++) stop_reading(s->meters + i, request, computed);
    stop_rhythm(s, request, s->now);
    return computed;
}

/* Give a decoding request no token in this step, because those before it have used up the budget. */
static void stall(State *s, number request) {
    s->computed[request] = stop_decoding(s, request);
    s->target[request] = s->computed[request] + 1;
    s->unsteady++;
}

static void remove_from_ring(State *s, number request) {
    s->after[s->before[request]] = s->after[request];
    s->before[s->after[request]] = s->before[request];
    s->running--;
}

/* A finished request whose last token is on the way: there is nothing to resume. */
static void forget_leaving(State *s, number request) {
    number kept = 0;
    for (number i = 0; i < s->num_leaving; i++)
        if (s->leaving[i] != request) s->leaving[kept++] = s->leaving[i];
    s->num_leaving = kept;
    s->is_leaving[request] = 0;
}

static void preempt_last(State *s) {
    number request = s->before[s->head], computed = s->computed[request], hashed = hashed_tokens(s, request);
    s->preempted++;
    if (s->is_leaving[request]) {
        forget_leaving(s, request);
        remove_from_ring(s, request);
        release(s, request, hashed);
        return;
    }
    if (s->steady[request]) {
        computed = stop_decoding(s, request);
        s->target[request] = computed + 1;
    } else {
        s->unsteady--;
    }
    s->lost += computed;
    s->length[request] = s->target[request];
    s->computed[request] = 0;
    s->last_step[request] = -2;
    s->head = request;
    s->head_needs = 0;
    s->running--;
    s->waiting++;
    release(s, request, hashed);
    s->alone = s->running ? 0 : s->alone + 1;
    if (s->alone > 1000) fail(s, TOO_FEW_BLOCKS); /* over and over, before it gets any further */
}

/* Preempt until that many blocks are free; returns 0 if at last the request itself had to go. */
static int make_room(State *s, number request, number blocks) {
    while (blocks > s->free) {
        number victim = s->before[s->head];
        preempt_last(s);
        if (victim == request) return 0;
    }
    return 1;
}

/* Note that a request, which is not steady, was computed up to `after` tokens. */
static void note_computed(State *s, number request, number after) {
    s->hashed[request] = after; /* a generated one is known: the request got none in the step before */
    cache(s, request, after);
    s->head_needs = 0; /* the head may find more now */
    s->last_tokens[request] = after - s->computed[request];
    s->last_step[request] = s->now;
    s->computed[request] = after;
}

static void add_chunk(Chunks *chunks, number request, number before, number after) {
    chunks->items[chunks->size++] = (Chunk){request, before, after};
}

/* ---- admission ---- */

/* The tokens that the head of the queue may compute in this step, 0 if it must wait. `hit`: the tokens it finds */
static number admissible(State *s, number request, number budget, number *hit) {
    number length = s->length[request], whole = 0;
    if (!budget) return 0;
    s->head_needs = s->settings.reserve_full_prompt ? least_needs(s, request, length, length - 1) : 0;
    if (s->free < s->head_needs) {
        s->facts->refused = 1;
        return 0;
    }
    *hit = lookup(s, request, length);
    number tokens = whole_blocks(s, request, *hit, least(length - *hit, budget)), end = *hit + tokens;
    if (!tokens) return 0;
    if (s->settings.reserve_full_prompt)
        whole = admission_needs(s, request, length, *hit, 1, has_checkpoint(s, request, *hit, length));
    number needed = whole;
    if (whole <= s->free && !(whole && s->keeps_all)) /* else the chunk needs no more than the whole prompt */
        needed = most(whole, admission_needs(s, request, end, *hit, 0, has_checkpoint(s, request, *hit, end)));
    if (needed > s->free) {
        s->facts->refused = 1; /* a hit grows only when others are prefilled */
        s->head_needs = s->settings.reserve_full_prompt ? least_needs(s, request, length, *hit) : 0;
        return 0;
    }
    note_free(s, s->free - needed);
    return tokens;
}

/* True if the head of the queue may be admitted now, in a step in which all others decode. */
static int may_admit(State *s) {
    number hit;
    if (!s->waiting || s->free < s->head_needs || s->running >= s->settings.max_num_seqs) return 0;
    if (s->changes == s->refused_changes && s->decoding == s->refused_decoding) return 0;
    if (admissible(s, s->head, s->settings.max_num_batched_tokens - s->decoding, &hit)) return 1;
    s->refused_changes = s->changes, s->refused_decoding = s->decoding;
    return 0;
}

/* Admit waiting requests while they find budget, slots and blocks. */
static void admit_waiting(State *s, number budget) {
    number hit = 0;
    while (s->waiting && budget && s->running < s->settings.max_num_seqs) {
        number request = s->head, tokens = admissible(s, request, budget, &hit);
        if (!tokens) break;
        s->head = s->after[request];
        s->waiting--;
        s->running++;
        s->unsteady++;
        admit(s, request, hit);
        take(s, request, hit + tokens, has_checkpoint(s, request, hit, hit + tokens));
        s->cached_tokens += hit;
        if (s->is_new[request]) {
            s->queried_tokens += s->length[request];
            s->hit_tokens += hit;
            s->again_tokens += most(s->earlier[request] - hit, 0);
            s->is_new[request] = 0;
        }
        budget -= tokens;
        s->computed[request] = hit;
        s->target[request] = s->length[request];
        note_computed(s, request, hit + tokens);
        add_chunk(&s->chunks, request, hit, hit + tokens);
    }
}

#endif
