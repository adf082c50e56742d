/* The blocks that a request takes and frees (vllm/v1/core/single_type_kv_cache_manager.py). */
#ifndef FP8PLAN_TABLES_H
#define FP8PLAN_TABLES_H

#include "free_blocks.h"

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
    index_blocks(s, group, content, block < shared ? shared : blocks_for(group, s->most_final[request]) + 1);
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

/* States follow mamba_cache_mode "align" (pool.Table): the state before the last is a step's input. */

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

/* Add the state of the last of `blocks` blocks, and with a checkpoint that before it, unless it is there. */
static void add_state(State *s, Table *table, number blocks, number checkpoint) {
    if (blocks <= table->end) return;
    if (table->end) table->last_state = table->end - 1;
    for (number block = blocks - 1 - checkpoint; block < blocks; block++)
        table->states[block] = new_span(s, block, block + 1, 1);
    table->end = blocks;
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

/* The new blocks that a request needs in a group to hold so many tokens.

   checkpoint: a state is kept inside the chunk */
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
    if (!table->states) fail(s, NO_MEMORY);
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

/* Let a trajectory's blocks [start, end) be found no more, because its next prompt leaves tokens out. */
static void hide_own(State *s, number request, number start, number end) {
    for (number g = 0; g < s->num_groups; g++) {
        Group *group = s->groups + g;
        Content *states = group->states + request;
        hide(s, group->own + request, start, group->gone);
        hide(s, states, start, group->gone);
        for (number block = start; states->oldest && block < end; block++) {
            states->oldest[block] = NULL;
            states->lost[block] = 0;
            states->computed_in[block] = 0;
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

#endif
