/* Steady requests take and free their blocks in a rhythm. */
#ifndef FP8PLAN_RHYTHM_H
#define FP8PLAN_RHYTHM_H

#include "prefix_cache.h"

static number remainder_of(number value, number size) {
    number rest = value % size;
    return rest < 0 ? rest + size : rest;
}

/* The place of a request among the members of a phase, or where it would stand. rank: its number in order of arrival */
static number place_of(const State *s, const Phase *phase, number rank) {
    number low = 0, high = phase->size;
    if (high && s->rank[phase->members[high - 1].request] <= rank) /* most often it is the newest one */
        return s->rank[phase->members[high - 1].request] < rank ? high : high - 1;
    while (low < high) {
        number middle = (low + high) / 2;
        if (s->rank[phase->members[middle].request] < rank) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void change_member(State *s, Phase *phase, number request, number takes, number drops) {
    number at = place_of(s, phase, s->rank[request]);
    if (at == phase->size || phase->members[at].request != request) {
        if (phase->size == phase->room)
            phase->members = grown(s, phase->members, phase->room = 2 * phase->room + 8, sizeof(Member));
        memmove(phase->members + at + 1, phase->members + at, (size_t)(phase->size++ - at) * sizeof(Member));
        phase->members[at] = (Member){request, 0, 0};
    }
    Member *member = phase->members + at;
    member->takes += takes, member->drops += drops;
    if (!member->takes && !member->drops)
        memmove(member, member + 1, (size_t)(--phase->size - at) * sizeof(Member));
}

/* Add to what a request takes and frees in a phase. */
static void change_phase(State *s, Phase *phase, number request, number takes, number drops) {
    phase->taken += takes, phase->drops += drops;
    s->taken_in_cycle += takes;
    if (s->ordered) change_member(s, phase, request, takes, drops);
}

/* Let a steady request take `sign` times its blocks in its phases. */
static void change_takes(State *s, number request, number sign) {
    for (number i = 0; i < s->num_growth; i++) {
        number size = s->growth[i].size;
        for (number at = remainder_of(-s->offset[request], size); at < s->cycle; at += size)
            change_phase(s, s->phases + at, request, sign * s->growth[i].blocks, 0);
    }
}

/* The remainder of the steps in which a window frees a block in the rhythm. */
static number rhythm(const State *s, const Group *group, number request) {
    return remainder_of(group->spec.window - 1 + s->settings.lag - s->offset[request], group->spec.block_size);
}

static void change_drops(State *s, const Group *group, number request, number sign) {
    number size = group->spec.block_size;
    for (number at = rhythm(s, group, request); at < s->cycle; at += size)
        change_phase(s, s->phases + at, request, 0, sign);
}

/* The least of start + period, start + 2 * period, ... that is greater than `above`. */
static number next_after(number above, number start, number period) {
    number cycles = above < start ? 0 : (above - start) / period + 1;
    return start + most(cycles, 1) * period;
}

/* The next number of computed tokens at which a decoding request frees a block. */
static number next_drop(const State *s, const Group *group, number computed) {
    number window = group->spec.window, size = group->spec.block_size, lag = s->settings.lag;
    if (group->spec.kind == SLIDING) return next_after(computed, window - 1 + lag, size);
    if (group->spec.kind == CHUNKED) return next_after(computed, lag, window);
    if (group->spec.kind == STATE && s->aligned_states) return next_after(computed, 1 + lag, size);
    return NEVER;
}

/* The computed tokens at which a group must be looked at again; NEVER if it keeps the rhythm from now on. */
static number next_look(State *s, Group *group, number request, number computed) {
    number change = next_drop(s, group, computed);
    if (group->spec.kind != SLIDING || group->tables[request].start < group->regular_from[request]) return change;
    if (change > computed + group->spec.block_size) return change - group->spec.block_size;
    group->regular[request] = 1;
    change_drops(s, group, request, 1);
    return NEVER;
}

/* Enter the next step in which a request, served in this one, may leave the rhythm, if there is one. */
static void plan(State *s, number request, number step) {
    leave(&s->events, request);
    if (step == s->since[request] && s->settings.lag) { /* tokens in flight before it decoded are processed then */
        enter(s, &s->events, request, step + 1);
        return;
    }
    number computed = step + s->offset[request], next = NEVER;
    for (number g = 0; g < s->num_groups; g++)
        if (!s->groups[g].regular[request]) next = least(next, next_look(s, s->groups + g, request, computed));
    if (next < NEVER) enter(s, &s->events, request, next - s->offset[request]);
}

/* Let a request decode from `step` on. in_flight: its computed tokens that are not yet processed */
static void start_rhythm(State *s, number request, number step, number computed, number in_flight) {
    s->offset[request] = computed - step;
    s->since[request] = step;
    s->in_flight[request] = in_flight;
    if (s->settings.holders_wait && s->aligned_states) hold_back_again(s, request, step, computed, in_flight);
    change_takes(s, request, 1);
    if (!s->followed) return;
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        number size = group->spec.block_size, first = s->prompts[request] / size;
        if (group->finds_few) first = most(first, s->junction[request] / size);
        if (s->settings.caching) group->regular_from[request] = most(first, group->tables[request].hit);
    }
    enter(s, &s->events, request, step);
}

/* End the steady decoding of a request at `step`. */
static void stop_rhythm(State *s, number request, number step) {
    number computed = step + s->offset[request];
    number processed = computed - s->settings.lag - (s->served[request] != step);
    forget_again(s, request);
    change_takes(s, request, -1);
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        Table *table = group->tables + request;
        if (group->regular[request]) {
            group->regular[request] = 0;
            change_drops(s, group, request, -1);
            table->start = most(table->start, skipped_tokens(group, processed) / group->spec.block_size);
        }
        if (group->spec.kind != STATE) table->end = blocks_for(group, computed);
    }
    leave(&s->events, request);
}

static int has_event(const State *s, number request, number step) {
    return s->events.place[request] != NONE && s->events.key[request] < (step + 1) * s->num_turns;
}

/* The next request that may leave the rhythm in a step; NEVER without one. */
static number event_in(const State *s, number step) {
    return comes_before(s, &s->events, step + 1) ? s->events.items[0] : NEVER;
}

/* Free the block that leaves a window in the rhythm, if this is a step for it. */
static void drop_in_rhythm(State *s, Group *group, number request, number step) {
    number size = group->spec.block_size;
    if (step % size != rhythm(s, group, request)) return;
    number end = skipped_tokens(group, step + s->offset[request] - s->settings.lag) / size;
    if (group->keeps) queue_own(s, group, request, end - 1, end);
    else free_clean(s, 1);
}

/* Free the blocks that a steady request frees in a step. */
static void drop_due(State *s, number request, number step) {
    int event = has_event(s, request, step);
    number in_flight = step == s->since[request] ? s->in_flight[request] : s->settings.lag;
    s->served[request] = step;
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        if (group->regular[request]) drop_in_rhythm(s, group, request, step);
        else if (event) drop_group(s, group, request, step + s->offset[request] - in_flight);
    }
    if (event) plan(s, request, step);
}

/* The new blocks that a steady request needs in a step. */
static number takes_due(const State *s, number request, number step) {
    number blocks = 0;
    for (number i = 0; i < s->num_growth; i++)
        if (!remainder_of(step + s->offset[request], s->growth[i].size)) blocks += s->growth[i].blocks;
    return blocks;
}

/* Hand out the blocks that `takes_due` counts. */
static void take_due(State *s, number request, number step, number blocks) {
    for (number g = 0; blocks && s->aligned_states && g < s->num_groups; g++) {
        Group *group = s->groups + g;
        number end = (step + s->offset[request]) / group->spec.block_size + 1;
        if (group->spec.kind == STATE) add_state(s, group->tables + request, end, 0);
    }
    hand_out(s, blocks);
}

/* The new blocks that all steady requests together need in a step. */
static number taken_in(const State *s, number step) { return s->phases[step % s->cycle].taken; }

static int is_member(const Phase *phase, number at, number request) {
    return at < phase->size && phase->members[at].request == request;
}

static int is_due(const State *s, number request, number step) {
    if (!s->ordered) return takes_due(s, request, step) > 0;
    const Phase *phase = s->phases + step % s->cycle;
    return is_member(phase, place_of(s, phase, s->rank[request]), request) || has_event(s, request, step);
}

/* Free the blocks of a member of a phase that keeps the rhythm. */
static void drop_member(State *s, const Member *member, number step) {
    if (s->hashed_drops) drop_due(s, member->request, step);
    else if (member->drops) free_clean(s, member->drops);
    s->served[member->request] = step;
}

/* Serve the steady requests in turn, up to one that does not find its blocks; returns it, or NONE.

   first: the least rank */
static number serve_in_turn(State *s, number step, number first) {
    const Phase *phase = s->phases + step % s->cycle;
    for (number at = place_of(s, phase, first);;) {
        number request = at < phase->size ? phase->members[at].request : NEVER, event = event_in(s, step);
        if (event == NEVER && request == NEVER) return NONE;
        if (request == NEVER || (event != NEVER && s->rank[event] <= s->rank[request])) {
            request = event;
            drop_due(s, request, step); /* it may enter the phase, at `at` */
        } else {
            drop_member(s, phase->members + at, step);
        }
        if (!is_member(phase, at, request)) continue;
        number blocks = phase->members[at++].takes;
        if (blocks > s->free) return request;
        take_due(s, request, step, blocks);
    }
}

/* Serve the steady requests in a step in which each is sure to find its blocks. */
static void serve_all(State *s, number step) {
    const Phase *phase = s->phases + step % s->cycle;
    if (phase->drops || s->aligned_states || event_in(s, step) != NEVER) serve_in_turn(s, step, 0);
    else hand_out(s, phase->taken);
}

#endif
