/* vLLM V1's scheduler for all KV-cache groups: the rules of the reference in Python, in C.

   `GroupState` in group_state.py, `GroupPool` in group_pool.py and `CachingGroupPool` in group_cache.py say why each rule
   is as it is. Names are theirs, and every number is the same: tests/model/schedule/test_compiled.py compares the two.
   Three structures differ, because C can afford them:

   - Free blocks with a hash stand in a linked queue of spans. The reference computes their places.
   - Equal groups are followed one by one. The reference follows them together.
   - The requests that change their blocks in a step are passed in order. The reference sums them up where it can.

   A request that is the only one of its prompt shares no block, so its prompt's blocks count as its own here.
*/
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t number;

/* ---- what Python passes ---- */

enum { FULL, SLIDING, CHUNKED, STATE }; /* kinds of groups; a latent one is FULL */

enum { /* columns of a row: state.ROW and state.PREFILL; three of each window follow */
    STEPS, DECODE_REQUESTS, DECODE_KV_TOKENS, RECOMPUTED_TOKENS, RUNNING, WAITING, USED_BLOCKS, PREEMPTIONS, FINISHED,
    PREFILL_TOKENS, PREFILL_REQUESTS, PREFILL_KV_TOKENS, PREFILL_PAIRS, SAMPLED_REQUESTS, CACHED_TOKENS, COLUMNS
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
    number *regular_from;       /* by request: the first block that may be freed in the rhythm */
    char *regular;              /* by request: it frees the group's blocks in the rhythm */
} Group;

/* A request that takes or frees blocks in the steps of a phase. */
typedef struct { number request, takes, drops; } Member;

/* The steps with one remainder modulo the pool's cycle. Members are in order of arrival. */
typedef struct { Member *members; number size, room, taken, drops; } Phase;

typedef struct { number size, blocks; } Growth; /* the blocks of one size that a request fills at once */

/* Requests by key; the least key comes first. */
typedef struct { number *key, *items, *place, size; } Heap;

/* KV tokens that decoding requests read in a window (windows.WindowMeter). */
typedef struct { Window window; number reads, growing; Heap turns; } Meter;

typedef struct { number request, before, after; } Chunk;
typedef struct { Chunk *items; number size; } Chunks;
typedef struct { number request; Content *content; number block; } Held;

typedef struct {
    jmp_buf failed;
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
    /* the last look-up */
    number *searched, num_searched;
    number looked_up, looked_up_tokens, looked_up_changes, hit, hit_free, shared_prefix;
    number *full_hit;
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
    const number *prompts;
    number now, running, waiting, head, head_needs, decoding, unsteady, context, preempted, lost, alone;
    number aligned, checkpoints, keeps_all;
    number refused_changes, refused_decoding;
    number *before, *after; /* unfinished requests as a ring in order of arrival; the last entry is no request */
    number *final, *length, *target, *computed, *junction, *last_step, *last_tokens, *hashed, *steady_from, *ended;
    char *steady, *is_leaving;
    number *finished, num_finished, *leaving, num_leaving;
    Heap finishes;
    Chunks chunks, again_chunks;
    Meter *meters;
    number *rows, num_rows, rows_room, columns;
} State;

/* ---- memory ---- */

static number least(number a, number b) { return a < b ? a : b; }
static number most(number a, number b) { return a > b ? a : b; }

static void *grown(State *s, void *old, number count, size_t size) {
    void *block = realloc(old, (size_t)most(count, 1) * size);
    if (!block) longjmp(s->failed, NO_MEMORY);
    return block;
}

/* An array of zeros that lives as long as the simulation. */
static void *zeros(State *s, number count, size_t size) {
    if (s->num_owned == s->owned_room)
        s->owned = grown(s, s->owned, s->owned_room = 2 * s->owned_room + 64, sizeof(void *));
    void *block = calloc((size_t)most(count, 1), size);
    if (!block) longjmp(s->failed, NO_MEMORY);
    return s->owned[s->num_owned++] = block;
}

static number *numbers(State *s, number count, number value) {
    number *values = zeros(s, count, sizeof(number));
    for (number i = 0; value && i < count; i++) values[i] = value;
    return values;
}

static Span *new_span(State *s, number start, number end, number holders) {
    enum { AT_ONCE = 256 };
    if (!s->unused) {
        Span *more = zeros(s, AT_ONCE, sizeof(Span));
        for (number i = 0; i < AT_ONCE; i++) {
            more[i].newer = s->unused;
            s->unused = more + i;
        }
    }
    Span *span = s->unused;
    s->unused = span->newer;
    *span = (Span){start, end, holders, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    return span;
}

static void drop_span(State *s, Span *span) {
    span->newer = s->unused;
    s->unused = span;
}

/* ---- heaps ---- */

static Heap new_heap(State *s) {
    number n = s->requests;
    return (Heap){numbers(s, n, 0), numbers(s, n, 0), numbers(s, n, NONE), 0};
}

static void put(Heap *heap, number at, number request) {
    heap->items[at] = request;
    heap->place[request] = at;
}

static void sift(Heap *heap, number at, number request) {
    const number *key = heap->key;
    while (at && key[request] < key[heap->items[(at - 1) / 2]]) {
        put(heap, at, heap->items[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (number child; (child = 2 * at + 1) < heap->size; at = child) {
        if (child + 1 < heap->size && key[heap->items[child + 1]] < key[heap->items[child]]) child++;
        if (key[request] < key[heap->items[child]]) break;
        put(heap, at, heap->items[child]);
    }
    put(heap, at, request);
}

/* Enter a request under a step. Those of one step come in order of arrival. */
static void enter(const State *s, Heap *heap, number request, number step) {
    heap->key[request] = step * s->requests + request;
    sift(heap, heap->place[request] == NONE ? heap->size++ : heap->place[request], request);
}

static void leave(Heap *heap, number request) {
    number at = heap->place[request];
    if (at == NONE) return;
    heap->place[request] = NONE;
    number moved = heap->items[--heap->size];
    if (moved != request) sift(heap, at, moved);
}

/* True if the first entry is under a step before `end`. */
static int comes_before(const State *s, const Heap *heap, number end) {
    return heap->size && heap->key[heap->items[0]] < end * s->requests;
}

/* The step of the first entry; NEVER without one. */
static number first_step(const State *s, const Heap *heap) {
    return heap->size ? heap->key[heap->items[0]] / s->requests : NEVER;
}

/* ---- free blocks (vllm/v1/core/block_pool.py, `free_blocks` and `get_new_blocks`) ---- */

static void enqueue(State *s, Span *span) {
    span->earlier = s->queue.earlier;
    span->later = &s->queue;
    span->earlier->later = s->queue.earlier = span;
    s->free += span->end - span->start;
    s->changes++;
}

static void dequeue(Span *span) {
    span->earlier->later = span->later;
    span->later->earlier = span->earlier;
    span->earlier = span->later = NULL;
}

static void free_clean(State *s, number blocks) {
    s->free += blocks;
    s->clean += blocks;
    s->changes++;
}

/* Let the blocks of a span be found: the newest copy of them, or the oldest. */
static void add_copy(Content *content, Span *span, int oldest) {
    Span *older = oldest ? NULL : content->last, *newer = oldest ? content->first : NULL;
    span->content = content;
    span->older = older, span->newer = newer;
    *(older ? &older->newer : &content->first) = span;
    *(newer ? &newer->older : &content->last) = span;
    for (number block = span->start; content->oldest && block < span->end; block++)
        if (!content->oldest[block]) content->oldest[block] = span;
}

/* Forget a span that holds no block. */
static void forget(State *s, Span *span) {
    *(span->older ? &span->older->newer : &span->content->first) = span->newer;
    *(span->newer ? &span->newer->older : &span->content->last) = span->older;
    if (span->front) span->front->rest = span->rest;
    if (span->rest) span->rest->front = span->front;
    dequeue(span);
    drop_span(s, span);
}

static int covers(const Span *span, number block) { return span->start <= block && block < span->end; }

/* Note that the copy of a block in a span is evicted. */
static void lose(const Span *span, number block) {
    Content *content = span->content;
    if (content->oldest[block] != span) return;
    Span *next = span->newer;
    while (next && !covers(next, block)) next = next->newer;
    content->oldest[block] = next;
    content->lost[block] = content->any_lost = 1;
}

/* Evict up to so many blocks of the span that was freed first, its last block first. */
static number evict(State *s, number blocks) {
    Span *span = s->queue.later;
    if (span == &s->queue) longjmp(s->failed, NO_MEMORY); /* the counts contradict each other */
    number gone = least(blocks, span->end - span->start);
    for (number i = 1; span->content->oldest && i <= gone; i++) lose(span, span->end - i);
    span->end -= gone;
    if (span->end == span->start) forget(s, span);
    return gone;
}

/* Hand out blocks: those without a hash first, then those that were freed first. */
static void hand_out(State *s, number blocks) {
    if (!blocks) return;
    s->changes++;
    s->free -= blocks;
    s->clean -= blocks;
    while (s->clean < 0) s->clean += evict(s, -s->clean);
}

static void let_go(State *s, Span *span) {
    if (--span->holders) return;
    if (span->content) {
        enqueue(s, span);
    } else {
        free_clean(s, span->end - span->start);
        drop_span(s, span);
    }
}

static void hold(State *s, Span *span) {
    if (span->holders++) return;
    dequeue(span);
    s->free -= span->end - span->start;
}

/* Split a span before block `at`, and return the part behind. If it is free, that would be evicted first. */
static Span *split(State *s, Span *span, number at) {
    Span *rest = new_span(s, at, span->end, span->holders);
    Content *content = span->content;
    span->end = at;
    rest->content = content;
    rest->older = span;
    rest->newer = span->newer;
    *(rest->newer ? &rest->newer->older : &content->last) = span->newer = rest;
    rest->front = span;
    rest->rest = span->rest;
    if (rest->rest) rest->rest->front = rest;
    span->rest = rest;
    if (span->earlier) {
        rest->earlier = span->earlier;
        rest->later = span;
        rest->earlier->later = span->earlier = rest;
    }
    for (number block = at; content->oldest && block < rest->end; block++)
        if (content->oldest[block] == span) content->oldest[block] = rest;
    return rest;
}

/* Take the blocks [start, end) out of a free span. The rest stays where it is in the queue. */
static void cut_out(State *s, Span *span, number start, number end) {
    if (end < span->end) split(s, span, end);
    if (start > span->start) span = split(s, span, start);
    s->free -= end - start;
    forget(s, span);
}

/* ---- which blocks can be found (vllm/v1/core/single_type_kv_cache_manager.py) ---- */

static number blocks_for(const Group *group, number tokens) {
    return (tokens + group->spec.block_size - 1) / group->spec.block_size;
}

/* Leading tokens that no later token reads once `processed` are computed (`get_num_skipped_tokens`). */
static number skipped_tokens(const Group *group, number processed) {
    number window = group->spec.window;
    if (group->spec.kind == SLIDING) return most(0, processed - window + 1);
    if (group->spec.kind == CHUNKED) return processed / window * window;
    return 0;
}

static void index_blocks(State *s, Group *group, Content *content, number blocks) {
    if (content->oldest) return;
    content->oldest = zeros(s, blocks, sizeof(Span *));
    content->lost = zeros(s, blocks, sizeof(char));
    if (group->spec.kind == STATE) content->computed_in = zeros(s, blocks, sizeof(number));
}

/* The content of a block of a shared prompt, or of a state. */
static Content *content_of(State *s, Group *group, number request, number block) {
    number shared = s->shared[request];
    Content *content = group->states + request;
    if (block < shared) content = group->prompts + s->prompt_of[request];
    index_blocks(s, group, content, block < shared ? shared : blocks_for(group, s->final[request]) + 1);
    return content;
}

typedef struct { number start, end; } Range;

/* The blocks of [start, end) that get a hash (`reachable_block_mask`), in at most two ranges; returns their number. */
static int findable(const State *s, const Group *group, number request, number start, number end, Range *ranges) {
    if (group->keeps) {
        ranges[0] = (Range){start, end};
        return start < end;
    }
    if (!group->finds_few) return 0;
    number size = group->spec.block_size;
    number prompt = (s->prompts[request] - 1) / size, junction = s->junction[request] / size;
    number tails[2] = {least(prompt, junction), most(prompt, junction)};
    int count = 0;
    for (int i = 0; i < 2; i++) {
        number first = most(start, tails[i] - group->reach), last = least(end, tails[i]);
        if (count) first = most(first, ranges[count - 1].end);
        if (first < last) ranges[count++] = (Range){first, last};
    }
    return count;
}

static void mark_computed(State *s, Content *content, number block) {
    content->computed_in[block] = s->began;
    s->new_states++;
}

static void hash_states(State *s, Group *group, number request, Range range) {
    for (number block = range.start; block < range.end; block++) {
        Span *state = group->tables[request].states[block];
        if (!state) continue;
        Content *content = content_of(s, group, request, block);
        add_copy(content, state, 0);
        mark_computed(s, content, block);
    }
}

static void add_part(State *s, Table *table, Span *span) {
    if (table->num_parts == table->parts_room)
        table->parts = grown(s, table->parts, table->parts_room = 2 * table->parts_room + 2, sizeof(Part));
    table->parts[table->num_parts++] = (Part){span, span->end};
}

/* Let the blocks be found that the first `tokens` tokens of a request fill. Its own ones only can be once they are
   free. */
static void hash(State *s, Group *group, number request, number tokens) {
    Table *table = group->tables + request;
    int is_state = group->spec.kind == STATE;
    number end = tokens / group->spec.block_size;
    if (!s->settings.caching || end <= table->hashed) return;
    Range ranges[2];
    int count = findable(s, group, request, table->hashed, is_state ? end : least(end, s->shared[request]), ranges);
    for (int i = 0; i < count; i++) {
        if (is_state) {
            hash_states(s, group, request, ranges[i]);
        } else {
            Span *span = new_span(s, ranges[i].start, ranges[i].end, 1);
            add_copy(content_of(s, group, request, span->start), span, 0);
            add_part(s, table, span);
        }
    }
    table->hashed = end;
    s->changes++;
}

static void hash_all(State *s, number request, number tokens) {
    for (number g = 0; g < s->num_groups; g++) hash(s, s->groups + g, request, tokens);
}

/* ---- the blocks that a request takes and frees ---- */

static void queue_own(State *s, Group *group, number request, number start, number end) {
    Span *span = new_span(s, start, end, 0);
    add_copy(group->own + request, span, start < group->tables[request].hit); /* a hit takes the oldest copies */
    enqueue(s, span);
}

/* Free a request's own blocks before block `end`, the last one first. */
static void free_own(State *s, Group *group, number request, number end) {
    Table *table = group->tables + request;
    number own = most(table->start, s->shared[request]), hashed = least(end, table->hashed), clean = end - own;
    if (own >= end) return;
    Range ranges[2];
    int count = s->settings.caching ? findable(s, group, request, most(own, table->hit), hashed, ranges) : 0;
    while (count--) {
        queue_own(s, group, request, ranges[count].start, ranges[count].end);
        clean -= ranges[count].end - ranges[count].start;
    }
    number hit = least(table->hit, hashed);
    if (own < hit) {
        queue_own(s, group, request, own, hit);
        clean -= hit - own;
    }
    if (clean) free_clean(s, clean);
}

/* Pass the spans of a table's parts before block `end` to s->passed; returns their number. */
static number take_parts(State *s, Table *table, number end) {
    number count = 0, kept = 0;
    for (number i = 0; i < table->num_parts; i++) {
        Part part = table->parts[i];
        for (; part.span && part.span->start < least(part.end, end); part.span = part.span->rest) {
            if (part.span->end > end) split(s, part.span, end);
            if (count == s->passed_room)
                s->passed = grown(s, s->passed, s->passed_room = 2 * s->passed_room + 64, sizeof(Span *));
            s->passed[count++] = part.span;
        }
        if (part.end > end) table->parts[kept++] = part;
    }
    table->num_parts = kept;
    return count;
}

/* Free a request's blocks of a shared prompt before block `end`, the last one first. */
static void free_shared(State *s, Group *group, number request, number end) {
    Table *table = group->tables + request;
    number clean = end - table->start;
    if (clean <= 0) return;
    for (number i = take_parts(s, table, end) - 1; i >= 0; i--) {
        clean -= s->passed[i]->end - s->passed[i]->start;
        let_go(s, s->passed[i]);
    }
    if (clean) free_clean(s, clean);
}

/* Free the blocks that a request holds before block `end`, the last one first. */
static void free_before(State *s, Group *group, number request, number end) {
    free_own(s, group, request, end);
    free_shared(s, group, request, least(end, s->shared[request]));
    group->tables[request].start = end;
}

/* Let the state of a block go, if there is one. */
static void let_go_at(State *s, Table *table, number block) {
    Span *state = table->states[block];
    table->states[block] = NULL;
    if (state) let_go(s, state);
}

/* States follow mamba_cache_mode "align" (group_blocks.Table): the state before the last is a step's input. */

static int has_state_before_last(const Table *table, const Group *group, number processed) {
    return 0 <= table->last_state && table->last_state < blocks_for(group, processed) - 1;
}

/* Drop the states before that of the last of `processed` tokens. */
static void drop_states(State *s, Group *group, number request, number processed) {
    Table *table = group->tables + request;
    number end = most(processed - 1, 0) / group->spec.block_size;
    end = least(end, table->end);
    int before_last = has_state_before_last(table, group, processed);
    if (end <= table->start && !before_last) return;
    hash(s, group, request, processed);
    for (number block = end - 1; block >= table->start; block--) let_go_at(s, table, block);
    if (before_last) let_go_at(s, table, table->last_state);
    table->start = most(end, table->start);
}

/* Add the state of the last of `blocks` blocks, and with a checkpoint that before it; returns the number of new ones. */
static number add_state(State *s, Table *table, number blocks, number checkpoint) {
    if (blocks <= table->end) return 0;
    if (table->end) table->last_state = table->end - 1;
    for (number block = blocks - 1 - checkpoint; block < blocks; block++)
        table->states[block] = new_span(s, block, block + 1, 1);
    table->end = blocks;
    return 1 + checkpoint;
}

/* Free one group's blocks that no token after the first `processed` ones reads. */
static void drop_group(State *s, Group *group, number request, number processed) {
    Table *table = group->tables + request;
    if (group->spec.kind == STATE) {
        if (s->settings.caching) drop_states(s, group, request, processed);
        return;
    }
    number end = skipped_tokens(group, processed) / group->spec.block_size;
    if (end <= table->start) return;
    hash(s, group, request, processed);
    free_before(s, group, request, end);
}

static void drop(State *s, number request, number processed) {
    for (number g = 0; g < s->num_groups; g++) drop_group(s, s->groups + g, request, processed);
}

/* The new blocks that a request needs in a group to hold so many tokens. checkpoint: a state is kept inside the chunk */
static number new_blocks(const State *s, const Group *group, number request, number tokens, number checkpoint) {
    number end = group->tables[request].end, blocks = blocks_for(group, tokens);
    if (group->spec.kind == STATE) {
        if (!s->settings.caching) return end ? 0 : 1;
        return blocks > end ? 1 + checkpoint : 0;
    }
    return most(blocks - end, 0);
}

static number needs(const State *s, number request, number tokens, number checkpoint) {
    number total = 0;
    for (number g = 0; g < s->num_groups; g++) total += new_blocks(s, s->groups + g, request, tokens, checkpoint);
    return total;
}

/* Give a table of states its places. */
static void open_table(State *s, Group *group, number request) {
    Table *table = group->tables + request;
    if (!s->settings.caching || group->spec.kind != STATE || table->states) return;
    table->states = calloc((size_t)blocks_for(group, s->final[request]) + 1, sizeof(Span *));
    if (!table->states) longjmp(s->failed, NO_MEMORY);
}

/* Hand out the blocks that `needs` counts. */
static void take(State *s, number request, number tokens, number checkpoint) {
    hand_out(s, needs(s, request, tokens, checkpoint));
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        Table *table = group->tables + request;
        number blocks = blocks_for(group, tokens);
        open_table(s, group, request);
        if (group->spec.kind == STATE) {
            if (s->settings.caching) add_state(s, table, blocks, checkpoint);
            else table->end = 1;
        } else {
            table->end = most(table->end, blocks);
        }
    }
}

/* Free all blocks of a request; those that its first `hashed_tokens` tokens fill have a hash. */
static void release(State *s, number request, number hashed_tokens) {
    hash_all(s, request, hashed_tokens);
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        Table *table = group->tables + request;
        if (group->spec.kind == STATE && s->settings.caching)
            for (number block = table->end - 1; block >= 0; block--) let_go_at(s, table, block);
        else
            free_before(s, group, request, table->end);
        free(table->states);
        *table = (Table){0, 0, 0, 0, NONE, NULL, table->parts, 0, table->parts_room};
    }
}

/* ---- hits of the prefix cache (vllm/v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator) ---- */

/* Note if a look-up of the blocks [start, end) came upon an evicted one. */
static void note_missed(State *s, const Content *content, number start, number end) {
    if (content->any_lost && memchr(content->lost + start, 1, (size_t)(end - start))) s->facts->missed_evicted = 1;
}

static int has(State *s, const Content *content, number block) {
    if (content->lost[block]) s->facts->missed_evicted = 1;
    return content->oldest[block] != NULL;
}

/* The end of the run of blocks from `start` on whose oldest copies are in one span. */
static number run_to(const Content *content, number start, number end) {
    const Span *span = content->oldest[start];
    end = least(end, span->end);
    if (!span->older) return end;
    while (++start < end && content->oldest[start] == span) continue;
    return start;
}

/* The oldest of a request's free spans that has a block; NULL without one. */
static Span *own_copy(const Group *group, number request, number block) {
    for (Span *span = group->own[request].first; span; span = span->newer)
        if (covers(span, block)) return span;
    return NULL;
}

/* The end of the run of blocks up to `end` that a request finds from `start` on. */
static number found_to(State *s, Group *group, number request, number start, number end) {
    number shared = least(end, s->shared[request]);
    if (start < shared) {
        const Content *content = content_of(s, group, request, start);
        number at = start;
        while (at < shared && content->oldest[at]) at = run_to(content, at, shared);
        note_missed(s, content, start, least(at + 1, shared));
        if (at < shared) return at;
        start = at;
    }
    while (start < end) {
        Span *span = own_copy(group, request, start);
        if (!span) break;
        start = least(span->end, end);
    }
    return start;
}

/* The end of the last run of `reach` blocks before `end` that a request finds, or of any run from block 0 on. */
static number found_before(State *s, Group *group, number request, number end) {
    number shared = s->shared[request];
    const Content *content = shared ? content_of(s, group, request, 0) : NULL;
    for (number block = end - 1; block >= 0; block--) {
        int found = block < shared ? has(s, content, block) : own_copy(group, request, block) != NULL;
        if (!found) end = block;
        else if (end - block >= group->reach) return end;
    }
    return end;
}

/* The longest hit in a group, in blocks, of at most `tokens` tokens. */
static number find(State *s, Group *group, number request, number tokens) {
    number end = tokens / group->spec.block_size;
    if (group->spec.kind == SLIDING) return found_before(s, group, request, end);
    if (group->spec.kind == STATE) {
        while (end && !has(s, content_of(s, group, request, end - 1), end - 1)) end--;
        return end;
    }
    group->hit_first = skipped_tokens(group, tokens) / group->spec.block_size;
    return found_to(s, group, request, group->hit_first, end);
}

/* The longest hit that all groups have: each cuts it, until none does. Full attention is looked up once. */
static number look_up(State *s, number request, number tokens) {
    number hit = tokens - 1, longest = 0, size = s->groups->spec.block_size;
    int simple = s->num_searched == 1 || (s->num_searched == 2 && s->groups[s->searched[0]].spec.kind == FULL);
    simple = s->num_groups == 1 || (s->num_searched == 2 && simple);
    for (number g = 0; g < s->num_groups; g++) {
        s->groups[g].hit_first = 0;
        s->full_hit[g] = NONE;
    }
    for (number current = hit;; current = hit) {
        for (number i = 0; i < s->num_searched; i++) {
            number g = s->searched[i];
            if (s->full_hit[g] != NONE) {
                current = least(current, s->full_hit[g]);
                continue;
            }
            current = find(s, s->groups + g, request, current) * size;
            longest = most(longest, current);
            if (s->groups[g].spec.kind == FULL) s->full_hit[g] = current;
        }
        if (current >= hit) break;
        hit = current;
        if (simple) break;
    }
    s->hit_free = NONE;
    s->shared_prefix = longest > hit ? longest : 0;
    if (s->num_groups > 1) s->junction[request] = s->shared_prefix;
    return hit;
}

/* The tokens of a request, out of that many, that are cached in every group. */
static number lookup(State *s, number request, number tokens) {
    if (!s->settings.caching) return 0;
    if (s->looked_up != request || s->looked_up_tokens != tokens || s->looked_up_changes != s->changes) {
        s->hit = look_up(s, request, tokens);
        s->looked_up = request, s->looked_up_tokens = tokens, s->looked_up_changes = s->changes;
    }
    return s->hit;
}

/* The blocks [start, end) of a shared prompt, or of states, whose oldest copies are free. */
static number free_copies(State *s, Group *group, number request, number start, number end) {
    if (start >= end) return 0;
    const Content *content = content_of(s, group, request, start);
    number total = 0;
    for (number stop; start < end; start = stop) {
        stop = run_to(content, start, end);
        if (!content->oldest[start]->holders) total += stop - start;
    }
    return total;
}

/* The free blocks of the last hit. Notes the first block of it that each group needs. */
static number free_in_hit(State *s, number request, number hit) {
    number total = 0;
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        number end = hit / group->spec.block_size, shared = s->shared[request];
        if (group->spec.kind == STATE) {
            group->hit_first = most(end - 1, 0);
            shared = end;
        } else {
            number first = s->groups[group->spec.first_equal].hit_first;
            group->hit_first = most(first, skipped_tokens(group, hit) / group->spec.block_size);
            total += most(end - most(group->hit_first, shared), 0);
        }
        total += free_copies(s, group, request, group->hit_first, least(end, shared));
    }
    return total;
}

/* Free blocks needed to admit the request looked up last; if there are too few, a lower bound.

   whole: for its whole prompt */
static number admission_needs(State *s, number request, number tokens, number hit, int whole, number checkpoint) {
    number total = 0;
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        number blocks = blocks_for(group, tokens), hits = hit / group->spec.block_size;
        if (group->spec.kind == STATE && !s->settings.caching) {
            total += 1;
        } else if (group->spec.kind == STATE) {
            if (hits && content_of(s, group, request, hits - 1)->computed_in[hits - 1] == s->began) return NEVER;
            total += (blocks > hits) + checkpoint;
        } else {
            if (whole && group->spec.cap != NONE) blocks = least(blocks, group->spec.cap);
            total += most(blocks - hits, 0);
        }
    }
    if (!s->settings.caching || total > s->free) return total;
    if (s->hit_free == NONE) s->hit_free = free_in_hit(s, request, hit);
    if (s->hit_free) s->facts->hit_freed_blocks = 1;
    return total + s->hit_free;
}

/* A lower bound of `admission_needs` for the whole prompt, for all hits of at most `hit` tokens.

   Counts the request's own blocks, which are free or new. Others may hold the prompt's blocks in the hit. */
static number least_needs(const State *s, number request, number tokens, number hit) {
    if (s->aligned_states) return 0;
    number total = 0, shared = s->shared[request];
    for (number g = 0; g < s->num_groups; g++) {
        const Group *group = s->groups + g;
        number hits = s->settings.caching ? hit / group->spec.block_size : 0, wanted = blocks_for(group, tokens);
        if (group->spec.kind == STATE) wanted = 1;
        if (group->spec.cap != NONE) wanted = least(wanted, group->spec.cap);
        number own = wanted - (group->spec.window ? hits : least(hits, shared));
        if (group->spec.kind == SLIDING && hits > shared) {
            own = wanted - most(shared, skipped_tokens(group, hit) / group->spec.block_size);
            if (hits > wanted) own = least(own, group->reach);
        }
        total += most(own, 0);
    }
    return total;
}

/* Take the blocks [start, end) of a request out of the queue, each from the oldest span that has it. */
static void pick(State *s, Group *group, number request, number start, number end) {
    while (start < end) {
        Span *span = own_copy(group, request, start);
        if (!span) longjmp(s->failed, NO_MEMORY); /* it was found before */
        number stop = start + 1; /* an older span may begin behind `start` */
        while (stop < least(end, span->end) && own_copy(group, request, stop) == span) stop++;
        cut_out(s, span, start, stop);
        start = stop;
    }
}

/* Hold the oldest copies of a shared prompt's blocks [start, end). */
static void hold_shared(State *s, Group *group, number request, number start, number end) {
    const Content *content = start < end ? content_of(s, group, request, start) : NULL;
    while (start < end) {
        Span *span = content->oldest[start];
        number stop = run_to(content, start, end);
        if (span->start < start) span = split(s, span, start);
        if (stop < span->end) split(s, span, stop);
        hold(s, span);
        add_part(s, group->tables + request, span);
        start = stop;
    }
}

static void hold_state(State *s, Group *group, number request, number block) {
    Span *state = content_of(s, group, request, block)->oldest[block];
    hold(s, state);
    group->tables[request].states[block] = state;
}

/* Hold the blocks that the last look-up hit. */
static void admit(State *s, number request, number hit) {
    if (!s->settings.caching) return;
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        Table *table = group->tables + request;
        number end = hit / group->spec.block_size, first = group->hit_first, shared = s->shared[request];
        open_table(s, group, request);
        if (group->spec.kind == STATE) {
            if (end) hold_state(s, group, request, first);
        } else {
            hold_shared(s, group, request, first, least(end, shared));
            pick(s, group, request, most(first, shared), end);
        }
        table->start = first;
        table->end = table->hit = table->hashed = end;
        table->last_state = NONE;
    }
    s->changes++;
}

/* ---- a kept state makes other requests wait (group_holders.HoldersWaitPool) ---- */

/* The number of whole blocks before the last token of a prompt. */
static number prompt_end(const State *s, number request) {
    return (s->prompts[request] - 1) / s->groups->spec.block_size;
}

/* Count the states at the end of a request's prompt, where it holds them, as computed in this step or in a later one.

   The latter are noted in `again`. */
static void hold_back(State *s, number request, int later) {
    number block = prompt_end(s, request) - 1;
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        const Table *table = group->tables + request;
        if (group->spec.kind != STATE || block < 0 || block >= table->end || !table->states[block]) continue;
        Content *content = content_of(s, group, request, block);
        if (!later) {
            mark_computed(s, content, block);
            continue;
        }
        if (s->num_again == s->again_room)
            s->again = grown(s, s->again, s->again_room = 2 * s->again_room + 64, sizeof(Held));
        s->again[s->num_again++] = (Held){request, content, block};
    }
}

static void hold_back_again(State *s, number request, number step, number computed, number in_flight) {
    number size = s->groups->spec.block_size, end = prompt_end(s, request);
    /* In its first step of decoding it still holds the state that the chunk in flight reads, or keeps inside. */
    if (!in_flight || computed / size != end || computed - in_flight > end * size) return;
    if (step != s->again_in) {
        s->again_in = step;
        s->num_again = 0;
    }
    hold_back(s, request, 1);
}

static void forget_again(State *s, number request) {
    number kept = 0;
    for (number i = 0; i < s->num_again; i++)
        if (s->again[i].request != request) s->again[kept++] = s->again[i];
    s->num_again = kept;
}

/* Forget the states that the step before computed. */
static void begin_step(State *s, number step) {
    s->began++;
    if (!s->settings.holders_wait) return;
    if (s->new_states) s->changes++; /* a request that hit them may be admitted now */
    s->new_states = 0;
    if (step == s->again_in)
        for (number i = 0; i < s->num_again; i++) mark_computed(s, s->again[i].content, s->again[i].block);
}

/* Let the blocks be found that the first `tokens` tokens of a request fill, which are computed. */
static void cache(State *s, number request, number tokens) {
    hash_all(s, request, tokens);
    if (s->settings.holders_wait && s->aligned_states &&
        tokens / s->groups->spec.block_size == prompt_end(s, request))
        hold_back(s, request, 0);
}

/* ---- steady requests take and free their blocks in a rhythm (group_pool.GroupPool) ---- */

static number remainder_of(number value, number size) {
    number rest = value % size;
    return rest < 0 ? rest + size : rest;
}

/* The place of a request among the members of a phase, or where it would stand. */
static number place_of(const Phase *phase, number request) {
    number low = 0, high = phase->size;
    if (high && phase->members[high - 1].request <= request) /* most often it is the newest one */
        return phase->members[high - 1].request < request ? high : high - 1;
    while (low < high) {
        number middle = (low + high) / 2;
        if (phase->members[middle].request < request) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Add to what a request takes and frees in a phase. */
static void change_member(State *s, Phase *phase, number request, number takes, number drops) {
    number at = place_of(phase, request);
    if (at == phase->size || phase->members[at].request != request) {
        if (phase->size == phase->room)
            phase->members = grown(s, phase->members, phase->room = 2 * phase->room + 8, sizeof(Member));
        memmove(phase->members + at + 1, phase->members + at, (size_t)(phase->size++ - at) * sizeof(Member));
        phase->members[at] = (Member){request, 0, 0};
    }
    Member *member = phase->members + at;
    member->takes += takes, member->drops += drops;
    phase->taken += takes, phase->drops += drops;
    s->taken_in_cycle += takes;
    if (!member->takes && !member->drops)
        memmove(member, member + 1, (size_t)(--phase->size - at) * sizeof(Member));
}

/* Let a steady request take `sign` times its blocks in its phases. */
static void change_takes(State *s, number request, number sign) {
    for (number i = 0; i < s->num_growth; i++) {
        number size = s->growth[i].size;
        for (number at = remainder_of(-s->offset[request], size); at < s->cycle; at += size)
            change_member(s, s->phases + at, request, sign * s->growth[i].blocks, 0);
    }
}

/* The remainder of the steps in which a window frees a block in the rhythm. */
static number rhythm(const State *s, const Group *group, number request) {
    return remainder_of(group->spec.window - 1 + s->settings.lag - s->offset[request], group->spec.block_size);
}

static void change_drops(State *s, const Group *group, number request, number sign) {
    number size = group->spec.block_size;
    for (number at = rhythm(s, group, request); at < s->cycle; at += size)
        change_member(s, s->phases + at, request, 0, sign);
}

/* The least of start + period, start + 2 * period, ... that is greater than `above`. */
static number next_after(number above, number start, number period) {
    number cycles = above < start ? 0 : (above - start) / period + 1;
    return start + most(cycles, 1) * period;
}

/* The next number of computed tokens at which a decoding request frees a block (group_pool.next_drop). */
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
    return s->events.place[request] != NONE && s->events.key[request] < (step + 1) * s->requests;
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

/* Hand out the blocks that `takes_due` counts. A state that is there already needs none. */
static void take_due(State *s, number request, number step, number blocks) {
    for (number g = 0; blocks && s->aligned_states && g < s->num_groups; g++) {
        Group *group = s->groups + g;
        if (group->spec.kind != STATE) continue;
        number end = (step + s->offset[request]) / group->spec.block_size + 1;
        blocks += add_state(s, group->tables + request, end, 0) - 1;
    }
    hand_out(s, blocks);
}

/* The new blocks that all steady requests together need in a step. */
static number taken_in(const State *s, number step) { return s->phases[step % s->cycle].taken; }

static int is_member(const Phase *phase, number at, number request) {
    return at < phase->size && phase->members[at].request == request;
}

static int is_due(const State *s, number request, number step) {
    const Phase *phase = s->phases + step % s->cycle;
    return is_member(phase, place_of(phase, request), request) || has_event(s, request, step);
}

/* Free the blocks of a member of a phase that keeps the rhythm. */
static void drop_member(State *s, const Member *member, number step) {
    if (s->hashed_drops) drop_due(s, member->request, step);
    else if (member->drops) free_clean(s, member->drops);
    s->served[member->request] = step;
}

/* Serve the steady requests from `first` on in turn, up to one that does not find its blocks; returns it, or NONE. */
static number serve_in_turn(State *s, number step, number first) {
    const Phase *phase = s->phases + step % s->cycle;
    for (number at = place_of(phase, first);;) {
        number request = at < phase->size ? phase->members[at].request : NEVER, event = event_in(s, step);
        if (event == NEVER && request == NEVER) return NONE;
        if (event <= request) {
            request = event;
            drop_due(s, request, step); /* it may enter the phase */
            at = place_of(phase, request);
        } else {
            drop_member(s, phase->members + at, step);
        }
        if (!is_member(phase, at, request)) continue;
        number blocks = phase->members[at++].takes;
        if (blocks > s->free) return request;
        take_due(s, request, step, blocks);
    }
}

/* The same in a phase in which they only take blocks that are all new. */
static number serve_takes(State *s, const Phase *phase, number first) {
    number at = place_of(phase, first), blocks = 0;
    while (at < phase->size && blocks + phase->members[at].takes <= s->free) blocks += phase->members[at++].takes;
    hand_out(s, blocks);
    return at < phase->size ? phase->members[at].request : NONE;
}

/* Serve the steady requests from `first` on, up to one that does not find its blocks; returns it, or NONE. */
static number serve(State *s, number step, number first) {
    const Phase *phase = s->phases + step % s->cycle;
    if (phase->drops || s->aligned_states || event_in(s, step) != NEVER) return serve_in_turn(s, step, first);
    if (first || phase->taken > s->free) return serve_takes(s, phase, first);
    hand_out(s, phase->taken);
    return NONE;
}

/* ---- what attention over a window reads (windows.py) ---- */

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
    enter(s, &meter->turns, request, s->now + full + (meter->window.kind == CHUNKED));
}

static void stop_reading(Meter *meter, number request, number computed) {
    meter->reads -= read_by(&meter->window, computed);
    if (meter->turns.place[request] == NONE) return;
    meter->growing--;
    leave(&meter->turns, request);
}

/* A full window grows no more. At the beginning of a chunk, a request reads one chunk less. */
static void pass_turns(const State *s, Meter *meter, number step) {
    while (comes_before(s, &meter->turns, step + 1)) {
        number request = meter->turns.items[0];
        leave(&meter->turns, request);
        if (meter->window.kind == SLIDING) {
            meter->growing--;
        } else {
            meter->reads -= meter->window.window;
            enter(s, &meter->turns, request, step + meter->window.window);
        }
    }
}

/* Advance by that many steps, and return the KV tokens read in them. */
static number advance(const State *s, Meter *meter, number steps) {
    number total = 0, now = s->now, end = s->now + steps;
    while (now < end) {
        number until = comes_before(s, &meter->turns, end) ? first_step(s, &meter->turns) : end, run = until - now;
        total += run * meter->reads + meter->growing * (run * (run - 1) / 2);
        meter->reads += run * meter->growing;
        now = until;
        pass_turns(s, meter, now);
    }
    return total;
}

/* ---- the scheduler (vllm/v1/core/sched/scheduler.py; group_state.GroupState) ---- */

static void note_free(State *s, number blocks) { s->facts->least_free = least(s->facts->least_free, blocks); }

/* -- chunks that end where a state can be kept (`_mamba_block_aligned_split`) -- */

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
    int kept = s->settings.retain_all || end >= prefill_end(s, request);
    return kept && covers_block(s, start, end);
}

/* The tokens of a chunk, cut to end where a state can be kept. */
static number whole_blocks(const State *s, number request, number start, number tokens) {
    number size = s->aligned, last = prefill_end(s, request), junction = s->junction[request];
    if (!size || start >= last) return tokens;
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

/* -- between waiting, prefill, decoding and finished -- */

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
    s->hashed[request] = hashed_tokens(s, request);
    if (s->now > s->steady_from[request]) s->last_tokens[request] = 1;
    s->computed[request] = stop_decoding(s, request);
    s->target[request] = s->computed[request] + 1;
    s->last_step[request] = s->now - 1;
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
    if (s->alone > 1000) longjmp(s->failed, TOO_FEW_BLOCKS); /* over and over, before it gets any further */
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
    /* A token generated in the step before is not known yet under asynchronous scheduling. */
    int unknown = s->settings.lag && s->last_step[request] == s->now - 1 && s->target[request] > s->length[request];
    s->hashed[request] = least(after, s->target[request] - unknown);
    cache(s, request, s->hashed[request]);
    s->head_needs = 0; /* the head may find more now */
    s->last_tokens[request] = after - s->computed[request];
    s->last_step[request] = s->now;
    s->computed[request] = after;
}

static void add_chunk(Chunks *chunks, number request, number before, number after) {
    chunks->items[chunks->size++] = (Chunk){request, before, after};
}

/* -- admission -- */

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
    if (whole <= s->free)
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

/* Admit waiting requests while they find budget, slots and blocks; returns the tokens found in the cache. */
static number admit_waiting(State *s, number budget) {
    number cached = 0, hit = 0;
    while (s->waiting && budget && s->running < s->settings.max_num_seqs) {
        number request = s->head, tokens = admissible(s, request, budget, &hit);
        if (!tokens) break;
        s->head = s->after[request];
        s->waiting--;
        s->running++;
        s->unsteady++;
        admit(s, request, hit);
        take(s, request, hit + tokens, has_checkpoint(s, request, hit, hit + tokens));
        cached += hit;
        budget -= tokens;
        s->computed[request] = hit;
        s->target[request] = s->length[request];
        note_computed(s, request, hit + tokens);
        add_chunk(&s->chunks, request, hit, hit + tokens);
    }
    return cached;
}

/* -- the end of a row -- */

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
    columns[WINDOW_DECODE] = advance(s, meter, steps);
    for (number i = 0; i < s->again_chunks.size; i++)
        columns[WINDOW_DECODE] += read_by(window, s->again_chunks.items[i].before);
    for (number i = 0; i < s->chunks.size; i++) {
        Chunk chunk = s->chunks.items[i];
        columns[WINDOW_PREFILL] += tokens_read(window, chunk.before, chunk.after);
        columns[WINDOW_PAIRS] += pairs_below(window, chunk.after) - pairs_below(window, chunk.before);
    }
}

/* Record a row. free: the blocks that are free while its last step runs */
static void record(State *s, number steps, number free, number cached) {
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
    row[CACHED_TOKENS] = cached;
    s->preempted = s->lost = 0;
    record_prefill(s, row);
    for (number i = 0; i < s->num_meters; i++)
        record_window(s, s->meters + i, steps, row + COLUMNS + WINDOW_COLUMNS * i);
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
static void end_row(State *s, number steps, number free, number cached) {
    if (s->decoding || s->chunks.size || s->again_chunks.size) record(s, steps, free, cached);
    s->now += steps;
    s->context += steps * s->decoding;
    start_all(s, &s->chunks);
    start_all(s, &s->again_chunks);
    pass_finishes(s);
    release_finished(s);
}

/* -- one step in which anything may happen -- */

static void serve_steady(State *s) {
    note_free(s, s->free - taken_in(s, s->now));
    for (number request = 0; (request = serve(s, s->now, request)) != NONE; request++)
        if (make_room(s, request, takes_due(s, request, s->now)))
            take_due(s, request, s->now, takes_due(s, request, s->now));
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
        serve(s, s->now, 0);
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
    number preempted = s->preempted, cached = 0, budget;
    int idle = !s->running; /* then a step that admits nobody would repeat for ever */
    begin_step(s, s->now);
    if (s->unsteady) {
        budget = serve_running(s);
    } else {
        serve_steady(s);
        budget = s->settings.max_num_batched_tokens - s->decoding;
    }
    if (s->preempted == preempted) cached = admit_waiting(s, budget);
    if (idle && !s->chunks.size) longjmp(s->failed, TOO_FEW_BLOCKS);
    end_row(s, 1, s->free, cached);
}

/* -- a run of steps in which requests only decode -- */

/* Steps up to and including the next finish of a request; 1 if a finished one still holds blocks. */
static number steps_to_finish(const State *s) {
    return s->num_leaving ? 1 : first_step(s, &s->finishes) - s->now + 1;
}

/* Run at most `wanted` steps in which all find their blocks, and none comes free. The head that had to wait waits on: it
   needs at most one block less for each that is handed out. */
static number run_takes(State *s, number wanted) {
    number cycles = wanted / s->cycle;
    if (s->taken_in_cycle) cycles = least(cycles, s->free / s->taken_in_cycle);
    number steps = cycles * s->cycle, blocks = cycles * s->taken_in_cycle;
    while (steps < wanted && blocks + taken_in(s, s->now + steps) <= s->free) blocks += taken_in(s, s->now + steps++);
    hand_out(s, blocks);
    note_free(s, steps < wanted ? NONE : s->free);
    return steps;
}

/* Run steps until a request finishes or is admitted, while every decoding request is sure to find its blocks. */
static void run(State *s) {
    number wanted = least(s->settings.longest, steps_to_finish(s)), steps = 0, looked_at = NONE;
    if (s->keeps_all && may_admit(s)) { /* decoding frees no block: a row of its own, admitted or not */
        step(s);
        return;
    }
    if (s->keeps_all && s->settings.reserve_full_prompt) {
        steps = run_takes(s, wanted);
        wanted = steps;
    }
    for (; steps < wanted; steps++) {
        number free = s->free, left = free - taken_in(s, s->now + steps); /* if no block comes free in the step */
        begin_step(s, s->now + steps);
        note_free(s, left);
        if (left < 0) break;
        serve(s, s->now + steps, 0);
        if (s->changes == looked_at) continue;
        looked_at = s->changes;
        if (!may_admit(s)) continue;
        if (steps) end_row(s, steps, free, 0);
        end_row(s, 1, s->free, admit_waiting(s, s->settings.max_num_batched_tokens - s->decoding));
        return;
    }
    if (steps) end_row(s, steps, s->free, 0);
    else step(s);
}

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
    s->full_hit = numbers(s, n, 0);
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

static void begin_requests(State *s, const number *responses) {
    number n = s->requests;
    number **zeroed[] = {&s->final, &s->length, &s->target, &s->computed, &s->junction, &s->last_tokens,
                         &s->hashed, &s->steady_from, &s->finished, &s->leaving};
    for (size_t i = 0; i < sizeof zeroed / sizeof *zeroed; i++) *zeroed[i] = numbers(s, n, 0);
    s->last_step = numbers(s, n, -2);
    s->before = numbers(s, n + 1, 0);
    s->after = numbers(s, n + 1, 0);
    s->steady = zeros(s, n, sizeof(char));
    s->is_leaving = zeros(s, n, sizeof(char));
    s->chunks.items = zeros(s, n, sizeof(Chunk));
    s->again_chunks.items = zeros(s, n, sizeof(Chunk));
    s->finishes = new_heap(s);
    s->refused_changes = NONE;
    s->waiting = n;
    for (number i = 0; i < n; i++) {
        s->final[i] = s->prompts[i] + responses[i] - 1;
        s->length[i] = s->target[i] = s->prompts[i];
    }
    for (number i = 0; i <= n; i++) {
        s->before[i] = i ? i - 1 : n;
        s->after[i] = i < n ? i + 1 : 0;
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
    s->meters = zeros(s, s->num_meters, sizeof(Meter));
    for (number i = 0; i < s->num_meters; i++) s->meters[i] = (Meter){windows[i], 0, 0, new_heap(s)};
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
   prompt_of: the prompt of each request
   windows:   the distinct windows among the groups
   facts:     receives what the pool meant to the schedule
   ended:     receives the row that ended each request
   rows:      receives the columns row by row, for fp8plan_columns */
number fp8plan_schedule(const number *counts, const number *prompts, const number *responses, const number *prompt_of,
                        const Settings *settings, const Spec *specs, const Window *windows, Facts *facts,
                        number *ended, number **rows) {
    State *s = calloc(1, sizeof(State));
    if (!s) return NO_MEMORY;
    s->requests = counts[0], s->num_groups = counts[2], s->num_meters = counts[3];
    s->settings = *settings;
    s->facts = facts;
    s->prompts = prompts, s->prompt_of = prompt_of, s->ended = ended;
    volatile number result = setjmp(s->failed);
    if (!result) {
        begin_requests(s, responses);
        begin_pool(s, specs, counts[1]);
        begin_shared(s, counts[1]);
        begin_chunks_of_states(s);
        begin_meters(s, windows);
        while (s->waiting || s->running) {
            if (s->unsteady || !s->decoding) step(s);
            else run(s);
        }
        result = s->num_rows;
        *rows = s->rows;
    } else {
        free(s->rows);
    }
    end(s);
    return result;
}
