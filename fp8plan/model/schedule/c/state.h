/* What Python passes, and the state of a simulation. */
#ifndef FP8PLAN_STATE_H
#define FP8PLAN_STATE_H

#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t number;

/* ---- what Python passes ---- */

enum { FULL, SLIDING, CHUNKED, STATE }; /* kinds of groups; a latent one is FULL */

enum { /* columns of a row: rows.Columns; three of each window follow */
    STEPS, DECODE_REQUESTS, DECODE_KV_TOKENS, RECOMPUTED_TOKENS, RUNNING, WAITING, USED_BLOCKS, PREEMPTIONS, FINISHED,
    PREFILL_TOKENS, PREFILL_REQUESTS, PREFILL_KV_TOKENS, PREFILL_PAIRS, SAMPLED_REQUESTS, CACHED_TOKENS,
    QUERIED_TOKENS, HIT_TOKENS, AWAY, AGAIN_TOKENS, IDLE_S, COLUMNS
};
enum { WINDOW_DECODE, WINDOW_PREFILL, WINDOW_PAIRS, WINDOW_COLUMNS };

enum { NONE = -1, NO_MEMORY = -1, TOO_FEW_BLOCKS = -2 };
static const number NEVER = (number)1 << 62; /* a step that does not come, and blocks that no pool has */

typedef struct {
    number num_blocks, caching, max_num_batched_tokens, max_num_seqs, reserve_full_prompt, lag, longest;
    number retain_all, leaves_one, holders_wait;
} Settings;

/* cap: the most blocks that the check of a whole prompt asks for, or NONE; first_equal: the first group of this spec */
typedef struct { number kind, block_size, window, checkpoints, cap, first_equal; } Spec;

typedef struct { number kind, window; } Window;

typedef struct { double seconds, least; } Costs;

/* cost/clock.Clock, with the numbers of kinds of reads, of requests and of sizes of chunks in its tables. */
typedef struct {
    const Costs *tokens, *sampled, *decode, *first, *further, *uneven;
    const double *launches, *host, *depths;
    number kinds, decode_rows, chunk_rows, num_depths, size_step, overlaps, leads, on_cpu;
} Clock;

/* turn_table.TurnTable, with the most trajectories at once. wait_s is by turn, like generated. */
typedef struct {
    const number *first, *generated, *tool, *dropped;
    const double *wait_s;
    number num_turns, concurrent;
    Clock clock;
} Turns;

typedef struct { number least_free, refused, hit_freed_blocks, missed_evicted; } Facts;

/* ---- the state of a simulation ---- */

typedef struct Span Span;

/* The blocks with one content in one group: a shared prompt, the states of a request, or its other blocks.

   The last kind has no arrays. They are by block. */
typedef struct {
    Span *first, *last;  /* spans that can be found, oldest first; neighbours of one age are in no order */
    Span **oldest;       /* the oldest one that has the block, or NULL */
    char *lost;          /* the oldest one that had the block was evicted once */
    number *computed_in; /* of a state: the last step, as State.began counts them, in which it counts as computed */
    int any_lost;
} Content;

/* Blocks [start, end) of one content, which are held together, or were freed together. */
struct Span {
    number start, end, holders;
    Content *content;      /* NULL: the blocks have no hash */
    Span *older, *newer;   /* neighbours in `content` */
    Span *earlier, *later; /* neighbours in the queue of free spans; NULL: it is not in the queue */
    Span *front, *rest;    /* what it was split from, and what was split off it last, if that is still there */
};

/* Blocks with a hash that a request holds: a span, and what was split off it, up to block `end`. */
typedef struct { Span *span; number end; } Part;

/* The blocks of one request in one group. */
typedef struct {
    number start;      /* the first block that it holds */
    number end;        /* number of blocks, with those that it no longer holds */
    number hit;        /* number of blocks found at its admission */
    number hashed;     /* leading blocks that have a hash, or need none */
    number last_state; /* in a group of states: the block of the step before the last */
    Span **states;     /* in a group of states: by block; NULL where one was never needed, or was let go */
    Part *parts;       /* in the others: those of a shared prompt, in order */
    number num_parts, parts_room;
} Table;

typedef struct {
    Spec spec;
    number reach;               /* blocks before its end that a hit needs */
    int finds_few, keeps;       /* a few of its full blocks can be found; all can */
    number hit_first;           /* the first block of the last look-up's hit that the group needs */
    Table *tables;              /* by request */
    Content *own;               /* by request: its free blocks that are no prompt blocks of several requests */
    Content *prompts, *states;  /* by prompt, and by request */
    Content *gone;              /* blocks with tokens that later prompts leave out, until they are evicted */
    number *regular_from;       /* by request: the first block that may be freed in the rhythm */
    char *regular;              /* by request: it frees the group's blocks in the rhythm */
} Group;

/* A request that takes or frees blocks in the steps of a phase. */
typedef struct { number request, takes, drops; } Member;

/* The steps with one remainder modulo the pool's cycle. Members are in order of arrival, if State.ordered. */
typedef struct { Member *members; number size, room, taken, drops; } Phase;

typedef struct { number size, blocks; } Growth; /* the blocks of one size that a request fills at once */

/* Requests by key; the least key comes first. */
typedef struct { number *key, *items, *place, size; } Heap;

/* KV tokens that decoding requests read in a window. read: by now in the steps of this row */
typedef struct { Window window; number reads, growing, read; Heap changes; } Meter;

/* A trajectory's next request. */
typedef struct { double seconds; number request; } Arrival;

/* loop.Times, and `ahead` of the last step (Clock.step). */
typedef struct { double scheduled, ended_before, ended, ahead; } Times;

typedef struct { number request, before, after; } Chunk;
typedef struct { Chunk *items; number size; } Chunks;
typedef struct { number request; Content *content; number block; } Held;

typedef struct {
    jmp_buf failed;
    number failure; /* NO_MEMORY or TOO_FEW_BLOCKS */
    Settings settings;
    Facts *facts;
    number requests, num_groups, num_meters;
    void **owned; /* every array, to be freed at the end */
    number num_owned, owned_room;
    /* the pool */
    number free, clean; /* free blocks; those of them without a hash */
    number changes;     /* counted, so that no look-up is repeated without one */
    Span queue;         /* both ends of the queue of free spans */
    Span *unused;       /* spans to use again, linked by `newer` */
    Span **passed;      /* room for the spans that a request lets go */
    number passed_room;
    Group *groups;
    const number *prompt_of;
    number *shared; /* by request: its prompt's blocks that other requests may hold, too */
    int followed, hashed_drops, aligned_states; /* decoding frees blocks; with a hash; it adds states */
    int ordered; /* steady requests differ in what they do in a step: phases list them */
    /* the last look-up */
    number *searched, num_searched;
    number looked_up, looked_up_tokens, looked_up_changes, hit, hit_free, shared_prefix;
    /* states that this step computes */
    number began, new_states, again_in, num_again, again_room;
    Held *again;
    /* steady requests */
    Growth *growth;
    number num_growth, cycle, taken_in_cycle;
    Phase *phases;
    Heap events; /* steps in which they may leave the rhythm */
    number *offset, *since, *in_flight, *served;
    /* the scheduler */
    number *prompts; /* of the turn that a trajectory is in */
    number now, running, waiting, head, head_needs, decoding, unsteady, context, preempted, lost, alone;
    number aligned, checkpoints, keeps_all;
    number refused_changes, refused_decoding;
    number *before, *after; /* requests that wait or run as a ring in order of arrival; the last entry is no request */
    number *final, *length, *target, *computed, *junction, *last_step, *last_tokens, *hashed, *steady_from, *ended;
    char *steady, *is_leaving;
    number *finished, num_finished, *leaving, num_leaving;
    Heap finishes;
    /* turns and time */
    const Turns *turns; /* NULL: each request has one, and all wait at the start */
    number num_turns, begun, arrived, away; /* begun: trajectories; arrived: requests */
    number cached_tokens, queried_tokens, hit_tokens, again_tokens; /* of requests admitted since the last row */
    number *turn, *most_final; /* by trajectory: its turn; the most tokens that are computed at the end of one */
    number *rank;    /* by request: its number in order of arrival; NONE: it is still to arrive */
    number *earlier; /* by request: tokens of earlier turns that the prefix cache may have */
    char *is_new;    /* by request: no step has served it in this turn */
    Arrival *arrivals;
    number num_arrivals;
    Times times, times_before; /* now, and before the row */
    double idle_s;             /* that the engine has waited since the last row */
    number timed, *timed_row;  /* steps of the row that have passed; the last of them as a row of its own */
    Chunks chunks, again_chunks;
    Meter *meters;
    number *rows, num_rows, rows_room, columns;
} State;

#endif
