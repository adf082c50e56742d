/* vLLM V1's scheduler for all KV-cache groups: the rules of the reference in Python, in C.

   `State` in state.py and `Pool` in pool.py say why each rule is as it is. Names are theirs, and every number is the
   same: tests/model/schedule/test_compiled.py compares. C is hundreds of times faster, for three reasons:

   - Blocks are held, queued and evicted in spans. In the reference each is an object.
   - Steady requests take and free their blocks in a rhythm, so that a step moves all of them on at once.
   - What cannot have changed is not looked up again.

   A request that is the only one of its prompt shares no block, so its prompt's blocks count as its own here. A
   trajectory is a request that comes back for each turn. What it has beyond the first turn's prompt is its own.
*/
#include "steps.h"

/* ---- the beginning and the end ---- */

static void begin_group(State *s, Group *group, number prompts) {
    number n = s->requests, kind = group->spec.kind;
    int few = kind == SLIDING || kind == STATE;
    group->reach = kind == STATE ? 1 : blocks_for(group, most(group->spec.window - 1, 0));
    group->finds_few = few && !s->settings.retain_all;
    group->keeps = s->settings.caching && !group->finds_few && !(few && !group->reach);
    group->tables = zeros(s, n, sizeof(Table));
    for (number i = 0; i < n; i++) group->tables[i].last_state = NONE;
    group->regular = zeros(s, n, sizeof(char));
    group->regular_from = numbers(s, n, 0);
    if (s->settings.caching) {
        group->own = zeros(s, n, sizeof(Content));
        group->states = zeros(s, n, sizeof(Content));
        group->prompts = zeros(s, prompts, sizeof(Content));
        group->gone = zeros(s, 1, sizeof(Content));
    }
}

/* Note the blocks of one size that a request fills at once, and the steps after which all sizes repeat. */
static void add_growth(State *s, number size) {
    number i = 0, a = s->cycle, b = size;
    while (i < s->num_growth && s->growth[i].size != size) i++;
    if (i == s->num_growth) s->growth[s->num_growth++].size = size;
    s->growth[i].blocks++;
    while (b) {
        number rest = a % b;
        a = b, b = rest;
    }
    s->cycle = s->cycle / a * size;
}

static void begin_pool(State *s, const Spec *specs, number prompts) {
    number n = s->num_groups;
    s->free = s->clean = s->facts->least_free = s->settings.num_blocks;
    s->queue.earlier = s->queue.later = &s->queue;
    s->cycle = 1;
    s->groups = zeros(s, n, sizeof(Group));
    s->growth = zeros(s, n, sizeof(Growth));
    s->searched = numbers(s, n, 0);
    s->looked_up = s->again_in = NONE;
    s->keeps_all = 1;
    for (number g = 0; g < n; g++) {
        Group *group = s->groups + g;
        number kind = specs[g].kind;
        group->spec = specs[g];
        begin_group(s, group, prompts);
        s->keeps_all &= kind == FULL;
        s->aligned_states |= s->settings.caching && kind == STATE;
        s->hashed_drops |= kind == SLIDING && group->keeps;
        if (s->settings.caching || kind != STATE) add_growth(s, specs[g].block_size);
    }
    for (int full = 1; full >= 0; full--) /* full attention is looked up first (`verify_and_split`) */
        for (number g = 0; g < n; g++)
            if (specs[g].first_equal == g && (specs[g].kind == FULL) == full) s->searched[s->num_searched++] = g;
    s->followed = s->aligned_states;
    for (number g = 0; g < n; g++) s->followed |= specs[g].window > 0;
    s->ordered = s->followed || s->num_growth > 1;
    s->phases = zeros(s, s->cycle, sizeof(Phase));
    s->events = new_heap(s);
    s->offset = numbers(s, s->requests, 0);
    s->since = numbers(s, s->requests, NONE);
    s->in_flight = numbers(s, s->requests, 0);
    s->served = numbers(s, s->requests, NONE);
}

/* The blocks of each request's prompt that other requests may hold, too. */
static void begin_shared(State *s, number prompts) {
    number *siblings = numbers(s, prompts, 0), size = s->groups->spec.block_size;
    s->shared = numbers(s, s->requests, 0);
    for (number i = 0; i < s->requests; i++) siblings[s->prompt_of[i]]++;
    for (number i = 0; s->settings.caching && i < s->requests; i++)
        if (siblings[s->prompt_of[i]] > 1) s->shared[i] = s->prompts[i] / size;
}

static void begin_requests(State *s, const number *prompts, const number *added) {
    number n = s->requests;
    number **zeroed[] = {&s->final, &s->length, &s->target, &s->computed, &s->junction, &s->last_tokens,
                         &s->hashed, &s->steady_from, &s->finished, &s->leaving, &s->prompts, &s->turn,
                         &s->most_final, &s->earlier};
    for (size_t i = 0; i < sizeof zeroed / sizeof *zeroed; i++) *zeroed[i] = numbers(s, n, 0);
    s->last_step = numbers(s, n, -2);
    s->rank = numbers(s, n, NONE);
    s->before = numbers(s, n + 1, n);
    s->after = numbers(s, n + 1, n);
    s->steady = zeros(s, n, sizeof(char));
    s->is_leaving = zeros(s, n, sizeof(char));
    s->is_new = zeros(s, n, sizeof(char));
    s->chunks.items = zeros(s, n, sizeof(Chunk));
    s->again_chunks.items = zeros(s, n, sizeof(Chunk));
    s->finishes = new_heap(s);
    s->refused_changes = NONE;
    s->arrivals = zeros(s, n, sizeof(Arrival));
    s->head = n;
    s->num_turns = s->turns ? s->turns->num_turns : n;
    s->begun = s->turns ? least(s->turns->concurrent, n) : n;
    for (number i = 0; i < n; i++) {
        s->prompts[i] = s->length[i] = s->target[i] = prompts[i];
        s->final[i] = s->most_final[i] = prompts[i] + added[i] - 1;
        s->is_new[i] = 1;
        if (s->turns) {
            s->turn[i] = s->turns->first[i];
            s->final[i] = prompts[i] + s->turns->generated[s->turn[i]] - 1;
        }
        if (i < s->begun) join_queue(s, i);
    }
}

static void begin_chunks_of_states(State *s) {
    s->aligned = s->aligned_states ? s->groups->spec.block_size : 0;
    s->checkpoints = s->aligned > 0;
    for (number g = 0; g < s->num_groups; g++)
        if (s->groups[g].spec.kind == STATE && !s->groups[g].spec.checkpoints) s->checkpoints = 0;
}

static void begin_meters(State *s, const Window *windows) {
    s->columns = COLUMNS + WINDOW_COLUMNS * s->num_meters;
    s->timed_row = numbers(s, s->columns, 0);
    s->meters = zeros(s, s->num_meters, sizeof(Meter));
    for (number i = 0; i < s->num_meters; i++) s->meters[i] = (Meter){windows[i], 0, 0, 0, new_heap(s)};
}

static void end(State *s) {
    for (number g = 0; s->groups && g < s->num_groups; g++)
        for (number i = 0; s->groups[g].tables && i < s->requests; i++) {
            free(s->groups[g].tables[i].states);
            free(s->groups[g].tables[i].parts);
        }
    for (number i = 0; s->phases && i < s->cycle; i++) free(s->phases[i].members);
    for (number i = 0; i < s->num_owned; i++) free(s->owned[i]);
    free(s->owned);
    free(s->again);
    free(s->passed);
    free(s);
}

/* Copy the rows that fp8plan_schedule made to an array of shape (num_columns, num_rows), and free them. */
void fp8plan_columns(number *rows, number num_rows, number num_columns, number *columns) {
    for (number start = 0; start < num_rows; start += 64) /* few enough rows for the CPU's cache */
        for (number column = 0; column < num_columns; column++)
            for (number row = start; row < num_rows && row < start + 64; row++)
                columns[column * num_rows + row] = rows[row * num_columns + column];
    free(rows);
}

/* Simulate a batch. Returns the number of rows; NO_MEMORY, also if the state contradicts itself; or TOO_FEW_BLOCKS if a
   request does not find the blocks that it needs in a pool that it has to itself.

   counts:    of requests, prompts, groups and windows
   prompts:   tokens of each request; of a trajectory, in its first turn
   added:     tokens after its prompt, at the turn where they are most
   prompt_of: the prompt of each request
   windows:   the distinct windows among the groups
   facts:     receives what the pool meant to the schedule
   ended:     receives the row that ended each request
   turns:     NULL if each request has one, and all wait at the start
   rows:      receives the columns row by row, for fp8plan_columns */
number fp8plan_schedule(const number *counts, const number *prompts, const number *added, const number *prompt_of,
                        const Settings *settings, const Spec *specs, const Window *windows, Facts *facts,
                        number *ended, const Turns *turns, number **rows) {
    State *s = calloc(1, sizeof(State));
    if (!s) return NO_MEMORY;
    s->requests = counts[0], s->num_groups = counts[2], s->num_meters = counts[3];
    s->turns = turns;
    s->settings = *settings;
    s->facts = facts;
    s->prompt_of = prompt_of, s->ended = ended;
    if (!setjmp(s->failed)) {
        begin_requests(s, prompts, added);
        begin_pool(s, specs, counts[1]);
        begin_shared(s, counts[1]);
        begin_chunks_of_states(s);
        begin_meters(s, windows);
        while (s->waiting || s->running || s->num_arrivals) {
            arrive(s);
            if (s->unsteady || !s->decoding) step(s);
            else run(s);
        }
    }
    number result = s->failure ? s->failure : s->num_rows;
    if (s->failure) free(s->rows);
    else *rows = s->rows;
    end(s);
    return result;
}
