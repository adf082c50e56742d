/* What attention over a window reads (windows.py). */
#ifndef FP8PLAN_WINDOWS_H
#define FP8PLAN_WINDOWS_H

#include "memory.h"

static number tokens_read(const Window *window, number before, number after) {
    if (window->kind == SLIDING) return after - most(0, before - window->window + 1);
    return after - before / window->window * window->window;
}

static number pairs_below(const Window *window, number position) {
    number size = window->window, full = position / size, rest = position % size;
    if (window->kind == CHUNKED) return full * (size * (size + 1) / 2) + rest * (rest + 1) / 2;
    number growing = least(position, size);
    return growing * (growing + 1) / 2 + (position - growing) * size;
}

/* KV tokens that the token after `computed` ones reads, itself included. */
static number read_by(const Window *window, number computed) {
    return window->kind == SLIDING ? least(computed + 1, window->window) : computed % window->window + 1;
}

static void start_reading(const State *s, Meter *meter, number request, number computed) {
    number read = read_by(&meter->window, computed), full = meter->window.window - read;
    meter->reads += read;
    if (meter->window.kind == SLIDING && !full) return;
    meter->growing++;
    enter(s, &meter->changes, request, s->now + full + (meter->window.kind == CHUNKED));
}

static void stop_reading(Meter *meter, number request, number computed) {
    meter->reads -= read_by(&meter->window, computed);
    if (meter->changes.place[request] == NONE) return;
    meter->growing--;
    leave(&meter->changes, request);
}

/* A full window grows no more. At the beginning of a chunk, a request reads one chunk less. */
static void pass_changes(const State *s, Meter *meter, number step) {
    while (comes_before(s, &meter->changes, step + 1)) {
        number request = meter->changes.items[0];
        leave(&meter->changes, request);
        if (meter->window.kind == SLIDING) {
            meter->growing--;
        } else {
            meter->reads -= meter->window.window;
            enter(s, &meter->changes, request, step + meter->window.window);
        }
    }
}

/* Advance from step `now` by that many steps, and return the KV tokens read in them. */
static number advance(const State *s, Meter *meter, number now, number steps) {
    number total = 0, end = now + steps;
    while (now < end) {
        number until = comes_before(s, &meter->changes, end) ? first_step(s, &meter->changes) : end, run = until - now;
        total += run * meter->reads + meter->growing * (run * (run - 1) / 2);
        meter->reads += run * meter->growing;
        now = until;
        pass_changes(s, meter, now);
    }
    return total;
}

#endif
