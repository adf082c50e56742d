/* The scheduler's steps, and the rows that record them (state.State; vllm/v1/core/sched/scheduler.py). */
#ifndef FP8PLAN_STEPS_H
#define FP8PLAN_STEPS_H

#include "clock.h"
#include "requests.h"

/* ---- the end of a row ---- */

static void record_prefill(const State *s, number *row) {
    for (number i = 0; i < s->chunks.size; i++) {
        Chunk chunk = s->chunks.items[i];
        row[PREFILL_TOKENS] += chunk.after - chunk.before;
        row[PREFILL_KV_TOKENS] += chunk.after;
        row[PREFILL_PAIRS] += (chunk.after - chunk.before) * (chunk.after + chunk.before + 1) / 2;
        row[SAMPLED_REQUESTS] += chunk.after == s->target[chunk.request];
    }
    row[PREFILL_REQUESTS] = s->chunks.size;
}

static void record_window(const State *s, Meter *meter, number steps, number *columns) {
    const Window *window = &meter->window;
    columns[WINDOW_DECODE] = meter->read + advance(s, meter, s->now + s->timed, steps - s->timed);
    meter->read = 0;
    for (number i = 0; i < s->again_chunks.size; i++)
        columns[WINDOW_DECODE] += read_by(window, s->again_chunks.items[i].before);
    for (number i = 0; i < s->chunks.size; i++) {
        Chunk chunk = s->chunks.items[i];
        columns[WINDOW_PREFILL] += tokens_read(window, chunk.before, chunk.after);
        columns[WINDOW_PAIRS] += pairs_below(window, chunk.after) - pairs_below(window, chunk.before);
    }
}

/* Record a row. free: the blocks that are free while its last step runs */
static void record(State *s, number steps, number free) {
    if (s->num_rows == s->rows_room) {
        s->rows_room = 2 * s->rows_room + 1024;
        s->rows = grown(s, s->rows, s->rows_room * s->columns, sizeof(number));
    }
    number *row = s->rows + s->columns * s->num_rows++;
    memset(row, 0, (size_t)s->columns * sizeof(number));
    row[STEPS] = steps;
    row[DECODE_REQUESTS] = row[SAMPLED_REQUESTS] = s->decoding + s->again_chunks.size;
    row[DECODE_KV_TOKENS] = s->context + s->decoding;
    for (number i = 0; i < s->again_chunks.size; i++) row[DECODE_KV_TOKENS] += s->again_chunks.items[i].after;
    row[RECOMPUTED_TOKENS] = s->lost;
    row[RUNNING] = s->running;
    row[WAITING] = s->waiting;
    row[USED_BLOCKS] = s->settings.num_blocks - free;
    row[PREEMPTIONS] = s->preempted;
    row[CACHED_TOKENS] = s->cached_tokens;
    row[QUERIED_TOKENS] = s->queried_tokens;
    row[HIT_TOKENS] = s->hit_tokens;
    row[AWAY] = s->away;
    row[AGAIN_TOKENS] = s->again_tokens;
    memcpy(row + IDLE_S, &s->idle_s, sizeof s->idle_s); /* its bits */
    s->preempted = s->lost = 0;
    s->cached_tokens = s->queried_tokens = s->hit_tokens = s->again_tokens = 0;
    record_prefill(s, row);
    for (number i = 0; i < s->num_meters; i++)
        record_window(s, s->meters + i, steps, row + COLUMNS + WINDOW_COLUMNS * i);
}

/* Let a step of a run pass, in which requests only decode. */
static void pass_decode(State *s, number step) {
    number *row = s->timed_row;
    if (!s->timed++) s->times_before = s->times;
    row[DECODE_REQUESTS] = row[SAMPLED_REQUESTS] = s->decoding;
    row[DECODE_KV_TOKENS] = s->context + (step + 1) * s->decoding;
    for (number i = 0; i < s->num_meters; i++) {
        number reads = advance(s, s->meters + i, s->now + step, 1);
        s->meters[i].read += reads;
        row[COLUMNS + WINDOW_COLUMNS * i + WINDOW_DECODE] = reads;
    }
    s->times.ahead = 0.0;
    pass(s, step_seconds(&s->turns->clock, row, &s->times.ahead));
}

/* Let the steps of the last row pass. Those of a run have passed. A row of one step follows the row before. */
static void pass_row(State *s, number steps) {
    if (s->turns && steps == 1) {
        if (s->timed) s->times = s->times_before;
        pass(s, step_seconds(&s->turns->clock, s->rows + s->columns * (s->num_rows - 1), &s->times.ahead));
    }
    s->timed = 0;
    s->idle_s = 0.0;
}

static void start_all(State *s, Chunks *chunks) {
    for (number i = 0; i < chunks->size; i++) {
        Chunk chunk = chunks->items[i];
        if (chunk.after == s->target[chunk.request]) start_decoding(s, chunk.request, chunk.after);
    }
    chunks->size = 0;
}

/* End the decoding of requests that have all their tokens. */
static void pass_finishes(State *s) {
    s->num_finished = 0;
    while (comes_before(s, &s->finishes, s->now)) {
        number request = s->finishes.items[0];
        if (s->now > s->steady_from[request]) {
            s->hashed[request] = s->final[request] - s->settings.lag;
            s->last_step[request] = s->now - 1;
        }
        s->computed[request] = stop_decoding(s, request);
        s->ended[request] = s->num_rows - 1;
        s->finished[s->num_finished++] = request;
        end_turn(s, request);
    }
    if (s->num_finished) s->rows[s->columns * (s->num_rows - 1) + FINISHED] = s->num_finished;
}

/* Release finished requests. Under asynchronous scheduling the scheduler knows of them a step later. */
static void release_finished(State *s) {
    if (s->settings.lag) {
        number *gone = s->leaving, num_gone = s->num_leaving;
        s->leaving = s->finished, s->num_leaving = s->num_finished;
        s->finished = gone, s->num_finished = num_gone;
        for (number i = 0; i < s->num_leaving; i++) s->is_leaving[s->leaving[i]] = 1;
    }
    for (number i = 0; i < s->num_finished; i++) {
        number request = s->finished[i];
        s->is_leaving[request] = 0;
        remove_from_ring(s, request);
        release(s, request, s->final[request]);
    }
}

/* Record a row, advance, start decoding after a whole prefill, and release finished requests. */
static void end_row(State *s, number steps, number free) {
    if (s->decoding || s->chunks.size || s->again_chunks.size) {
        record(s, steps, free);
        pass_row(s, steps);
    } else {
        pass(s, 0.0);
    }
    s->now += steps;
    s->context += steps * s->decoding;
    start_all(s, &s->chunks);
    start_all(s, &s->again_chunks);
    pass_finishes(s);
    release_finished(s);
}

/* ---- one step in which anything may happen ---- */

/* Hand out the blocks of steady requests that all take equally many. The last requests make room for the others. */
static void serve_equal(State *s) {
    const Phase *phase = s->phases + s->now % s->cycle;
    number each = s->growth->blocks, served = 0, wanted;
    while ((wanted = phase->taken - served) > s->free) {
        number blocks = s->free / each * each;
        hand_out(s, blocks);
        served += blocks;
        preempt_last(s); /* it leaves the phase */
    }
    hand_out(s, wanted);
}

/* Serve the steady requests in turn. */
static void serve_ordered(State *s) {
    number request, first = 0;
    while ((request = serve_in_turn(s, s->now, first)) != NONE) {
        first = s->rank[request] + 1;
        number blocks = takes_due(s, request, s->now);
        if (make_room(s, request, blocks)) take_due(s, request, s->now, blocks);
    }
}

/* Serve a steady request among others that are not. */
static void serve_due(State *s, number request) {
    drop_due(s, request, s->now);
    number blocks = takes_due(s, request, s->now);
    if (!make_room(s, request, blocks)) return;
    take_due(s, request, s->now, blocks);
    note_free(s, s->free);
}

/* Serve a request that is not steady, with at most `budget` tokens; returns their number. */
static number serve_unsteady(State *s, number request, number budget) {
    number before = s->computed[request];
    number tokens = whole_blocks(s, request, before, least(s->target[request] - before, budget));
    if (!tokens) return 0;
    number after = before + tokens;
    int served_before = s->settings.lag && s->last_step[request] == s->now - 1;
    drop(s, request, most(0, before - (served_before ? s->last_tokens[request] : 0)));
    int checkpoint = has_checkpoint(s, request, before, after);
    if (!make_room(s, request, needs(s, request, after, checkpoint))) return 0;
    take(s, request, after, checkpoint);
    note_free(s, s->free);
    add_chunk(s->target[request] > s->length[request] ? &s->again_chunks : &s->chunks, request, before, after);
    note_computed(s, request, after);
    return tokens;
}

/* The running request after the last steady one; NONE if one that is not steady has its turn before. */
static number after_steady(const State *s) {
    number left = s->decoding, request = s->after[s->requests];
    if (!left) return NONE;
    while (left && (s->steady[request] || s->is_leaving[request])) {
        left -= s->steady[request];
        request = s->after[request];
    }
    return left ? NONE : request;
}

/* Serve the running requests in turn; returns the budget left. */
static number serve_running(State *s) {
    number budget = s->settings.max_num_batched_tokens, request = after_steady(s);
    number left = s->free - taken_in(s, s->now);
    if (request != NONE && left >= 0 && s->decoding <= budget) {
        serve_all(s, s->now);
        note_free(s, left);
        budget -= s->decoding;
    } else {
        request = s->after[s->requests];
    }
    for (; request != s->head && budget; request = s->after[request]) {
        if (s->steady[request]) {
            budget--;
            if (is_due(s, request, s->now)) serve_due(s, request);
        } else if (!s->is_leaving[request]) {
            budget -= serve_unsteady(s, request, budget);
        }
        if (request == s->head) break; /* it preempted itself */
    }
    for (; !budget && request != s->head; request = s->after[request])
        if (s->steady[request]) stall(s, request);
    return budget;
}

static void step(State *s) {
    number preempted = s->preempted, budget;
    int idle = !s->running; /* then a step that admits nobody would repeat for ever */
    begin_step(s, s->now);
    if (s->unsteady) {
        budget = serve_running(s);
    } else {
        if (s->ordered) serve_ordered(s);
        else serve_equal(s);
        budget = s->settings.max_num_batched_tokens - s->decoding;
    }
    if (s->preempted == preempted) admit_waiting(s, budget);
    if (idle && !s->chunks.size) fail(s, TOO_FEW_BLOCKS);
    end_row(s, 1, s->free);
}

/* ---- a run of steps in which requests only decode ---- */

/* Steps up to and including the next finish of a request; 1 if a finished one still holds blocks. */
static number steps_to_finish(const State *s) {
    return s->num_leaving ? 1 : first_step(s, &s->finishes) - s->now + 1;
}

/* Run at most `wanted` steps in which all find their blocks, and none comes free; returns their number.

   The head that had to wait waits on: for each block that is handed out it needs at most one less. */
static number run_takes(State *s, number wanted) {
    number cycles = wanted / s->cycle;
    if (s->taken_in_cycle) cycles = least(cycles, s->free / s->taken_in_cycle);
    number steps = cycles * s->cycle, blocks = cycles * s->taken_in_cycle, at = s->now % s->cycle;
    while (steps < wanted && blocks + s->phases[at].taken <= s->free) {
        blocks += s->phases[at].taken;
        steps++;
        at = at + 1 == s->cycle ? 0 : at + 1;
    }
    hand_out(s, blocks);
    note_free(s, steps < wanted ? NONE : s->free);
    return steps;
}

/* Run steps until a request finishes, arrives or is admitted, while every decoding one is sure to find its blocks. */
static void run(State *s) {
    number wanted = least(s->settings.longest, steps_to_finish(s)), steps = 0, looked_at = NONE;
    if (s->keeps_all && may_admit(s)) { /* decoding frees no block: a row of its own, admitted or not */
        step(s);
        return;
    }
    if (s->keeps_all && s->settings.reserve_full_prompt && !s->turns) {
        steps = run_takes(s, wanted);
        wanted = steps;
    }
    for (; steps < wanted; steps++) {
        number free = s->free, left = free - taken_in(s, s->now + steps); /* if no block comes free in the step */
        begin_step(s, s->now + steps);
        note_free(s, left);
        if (left < 0) break;
        serve_all(s, s->now + steps);
        if (s->changes != looked_at && may_admit(s)) {
            if (steps) end_row(s, steps, free);
            admit_waiting(s, s->settings.max_num_batched_tokens - s->decoding);
            end_row(s, 1, s->free);
            return;
        }
        looked_at = s->changes;
        if (!s->turns) continue;
        pass_decode(s, steps);
        if (sees_arrival(s)) wanted = steps + 1;
    }
    if (steps) end_row(s, steps, s->free);
    else step(s);
}

#endif
