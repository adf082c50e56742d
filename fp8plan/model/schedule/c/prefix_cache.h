/* Hits of the prefix cache (vllm/v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator). */
#ifndef FP8PLAN_PREFIX_CACHE_H
#define FP8PLAN_PREFIX_CACHE_H

#include "tables.h"

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
    for (number g = 0; g < s->num_groups; g++) s->groups[g].hit_first = 0;
    for (number current = hit, round = 0;; current = hit, round++) {
        for (number i = 0; i < s->num_searched; i++) {
            Group *group = s->groups + s->searched[i];
            if (round && group->spec.kind == FULL) continue;
            current = find(s, group, request, current) * size;
            longest = most(longest, current);
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
            total += 1 + checkpoint; /* a hit leaves a token to compute */
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
        if (!span) fail(s, NO_MEMORY); /* it was found before */
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

/* ---- a kept state makes other requests wait (holders.HoldersWaitPool) ---- */

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

#endif
