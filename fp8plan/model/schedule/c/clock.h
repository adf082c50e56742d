/* The seconds of a step (fp8plan/model/cost/clock.py). With -ffp-contract=off the bits are those of Python. */
#ifndef FP8PLAN_CLOCK_H
#define FP8PLAN_CLOCK_H

#include <math.h>

#include "state.h"

/* The root of x^n + y^n for n = 2^doublings. */
static double norm(double x, double y, int doublings) {
    double largest = x > y ? x : y, ratio = x > y ? y / x : x / y;
    for (int i = 0; i < doublings; i++) ratio = ratio * ratio;
    double total = 1.0 + ratio;
    for (int i = 0; i < doublings; i++) total = sqrt(total);
    return largest * total;
}

/* The costs at a depth. table: those at the clock's depths */
static Costs at_depth(const Clock *clock, const Costs *table, double depth) {
    number low = 0, high = clock->num_depths - 1; /* the cell that has the depth, or the last one */
    while (high - low > 1) {
        number middle = (low + high) / 2;
        if (clock->depths[middle] <= depth) low = middle;
        else high = middle;
    }
    double share = (depth - clock->depths[low]) / (clock->depths[low + 1] - clock->depths[low]);
    Costs a = table[low], b = table[low + 1];
    return (Costs){a.seconds + (b.seconds - a.seconds) * share, a.least + (b.least - a.least) * share};
}

static void add_costs(Costs *total, double times, Costs costs) {
    total->seconds += times * costs.seconds;
    total->least += times * costs.least;
}

/* The KV tokens that decoding requests read, or the pairs of chunks, in each kind of reads: first in all the context */
static double decoded(const number *row, number kind) {
    return (double)(kind ? row[COLUMNS + WINDOW_COLUMNS * (kind - 1) + WINDOW_DECODE] : row[DECODE_KV_TOKENS]);
}

static double pairs(const number *row, number kind) {
    return (double)(kind ? row[COLUMNS + WINDOW_COLUMNS * (kind - 1) + WINDOW_PAIRS] : row[PREFILL_PAIRS]);
}

static Costs gpu_costs(const Clock *clock, const number *row) {
    number requests = row[DECODE_REQUESTS], tokens = row[PREFILL_TOKENS], chunks = row[PREFILL_REQUESTS];
    Costs total = clock->tokens[requests + tokens];
    add_costs(&total, 1.0, clock->sampled[row[SAMPLED_REQUESTS]]);
    for (number kind = 0; requests && kind < clock->kinds; kind++) {
        const Costs *table = clock->decode + (kind * clock->decode_rows + requests) * clock->num_depths;
        add_costs(&total, 1.0, at_depth(clock, table, decoded(row, kind) / (double)requests));
    }
    if (!chunks) return total;
    number size = (tokens + chunks * clock->size_step - 1) / (chunks * clock->size_step);
    for (number kind = 0; kind < clock->kinds; kind++) {
        number at = (kind * clock->chunk_rows + size) * clock->num_depths;
        double depth = pairs(row, kind) / (double)tokens;
        add_costs(&total, 1.0, at_depth(clock, clock->first + at, depth));
        add_costs(&total, (double)(chunks - 1), at_depth(clock, clock->further + at, depth));
    }
    double even = (double)tokens / 2.0 + (double)chunks * (pairs(row, 0) / (double)tokens - 0.5);
    add_costs(&total, (double)row[PREFILL_KV_TOKENS] - even, *clock->uneven);
    return total;
}

/* The seconds of a step. row: the columns of a row of one step; ahead: as in `Clock.step`, replaced by the next one */
static double step_seconds(const Clock *clock, const number *row, double *ahead) {
    number requests = row[DECODE_REQUESTS], tokens = row[PREFILL_TOKENS], chunks = row[PREFILL_REQUESTS];
    Costs costs = gpu_costs(clock, row);
    double gpu = norm(costs.seconds, costs.least, 4), before = *ahead;
    double launching = clock->launches[2 * (requests + tokens) + (tokens > 0)];
    double host = clock->host[0] + (double)(requests + chunks) * clock->host[1] + (double)tokens * clock->host[2];
    *ahead = 0.0;
    if (!clock->overlaps) return host + (clock->on_cpu ? gpu + launching : norm(gpu, launching, 3));
    host += launching;
    double alone = norm(gpu, host, 3);
    if (!clock->leads) return alone;
    *ahead = alone - host;
    return launching == 0.0 ? alone : norm(before + gpu, host, 3) - before;
}

#endif
