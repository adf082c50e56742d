/* The loop of vLLM's engine over time (loop.Loop; vllm/v1/engine/core.py). */
#ifndef FP8PLAN_LOOP_H
#define FP8PLAN_LOOP_H

#include "memory.h"

static double later(double a, double b) { return b > a ? b : a; }

/* ---- the requests that are still to arrive: a heap by time, then by number ---- */

static int arrives_before(Arrival a, Arrival b) {
    return a.seconds < b.seconds || (a.seconds == b.seconds && a.request < b.request);
}

/* Let a trajectory's next request arrive `wait_s` after the end of the last step. */
static void expect(State *s, double wait_s, number request) {
    Arrival arrival = {s->times.ended + wait_s, request}, *heap = s->arrivals;
    number at = s->num_arrivals++;
    for (; at && arrives_before(arrival, heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = arrival;
}

static number take_arrival(State *s) {
    Arrival *heap = s->arrivals, last = heap[--s->num_arrivals];
    number request = heap->request, at = 0;
    for (number child; (child = 2 * at + 1) < s->num_arrivals; at = child) {
        if (child + 1 < s->num_arrivals && arrives_before(heap[child + 1], heap[child])) child++;
        if (arrives_before(last, heap[child])) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return request;
}

/* ---- time ---- */

/* The time at which the next step is scheduled. */
static double next_scheduled(const State *s) {
    return later(s->settings.lag ? s->times.ended_before : s->times.ended, s->times.scheduled);
}

/* True if the next step sees an arrival. */
static int sees_arrival(const State *s) { return s->num_arrivals && s->arrivals->seconds <= next_scheduled(s); }

/* Let an engine without a request wait for the next arrival. */
static void wait_for_arrival(State *s) {
    double idle_s = s->arrivals->seconds - s->times.ended;
    if (idle_s > 0.0) {
        s->idle_s += idle_s;
        s->times.ahead = 0.0;
    }
    s->times.scheduled = later(s->arrivals->seconds, s->times.scheduled);
}

/* Pass a step; 0 seconds if it serves nobody. */
static void pass(State *s, double seconds) {
    double scheduled = next_scheduled(s), begin = later(s->times.ended, scheduled);
    s->times.scheduled = scheduled;
    s->times.ended_before = s->times.ended;
    s->times.ended = begin + seconds;
}

#endif
