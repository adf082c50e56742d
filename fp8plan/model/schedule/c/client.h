/* The turns of trajectories, and the requests that arrive (client.Client and state.State). */
#ifndef FP8PLAN_CLIENT_H
#define FP8PLAN_CLIENT_H

#include "loop.h"
#include "tables.h"

/* Let a request join the queue. */
static void join_queue(State *s, number request) {
    number nobody = s->requests, last = s->before[nobody];
    s->after[last] = s->before[nobody] = request;
    s->before[request] = last;
    s->after[request] = nobody;
    s->rank[request] = s->arrived++;
    s->waiting++;
    if (s->head == nobody) s->head = request;
}

/* Let a trajectory go on when a tool has answered, or make room for another. */
static void end_turn(State *s, number request) {
    number turn = s->turn[request];
    if (!s->turns) return;
    if (turn + 1 < s->turns->first[request + 1]) {
        s->away++;
        expect(s, s->turns->wait_s[turn], request);
    } else if (s->begun < s->requests) {
        expect(s, 0.0, s->begun++);
    }
}

/* Make a trajectory's entry that of the next turn's request. */
static void begin_next_turn(State *s, number request) {
    number computed = s->final[request], turn = s->turn[request]++, dropped = s->turns->dropped[turn];
    number kept = dropped ? s->prompts[request] : computed; /* tokens of the same blocks: the answer's first ones go */
    number prompt = computed + 1 + s->turns->tool[turn] - dropped; /* the last generated token was not computed */
    number size = s->settings.caching ? s->groups->spec.block_size : 1;
    if (dropped && s->settings.caching) hide_own(s, request, kept / size, computed / size);
    s->away--;
    s->earlier[request] = least(kept, prompt - 1) / size * size;
    s->is_new[request] = 1;
    s->prompts[request] = s->length[request] = s->target[request] = prompt;
    s->final[request] = prompt + s->turns->generated[turn + 1] - 1;
}

/* Let the requests join the queue that the next step sees. */
static void arrive(State *s) {
    if (!s->waiting && !s->running) wait_for_arrival(s);
    while (sees_arrival(s)) {
        number request = take_arrival(s);
        if (s->rank[request] != NONE) begin_next_turn(s, request);
        join_queue(s, request);
    }
}

#endif
