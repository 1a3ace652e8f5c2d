/* The commit vote in one call: the same frames as transport/vote.py, the same combination as core/ballot.py. */

#include "native.h"

#include <endian.h>
#include <string.h>

enum { KIND_BALLOT = 3, KIND_RESULT = 4 };

/* As it travels: network order. */
typedef struct {
    uint64_t epoch_min, epoch_max, step_min, step_max, plan_min, plan_max; /* signed */
    uint8_t staged, padding[3];
    uint32_t ready_leavers;
} ballot_frame;
_Static_assert(sizeof(ballot_frame) == 56, "core/ballot.py");

static void keep_lower(uint64_t *into, uint64_t other) {
    if ((int64_t)be64toh(other) < (int64_t)be64toh(*into)) *into = other;
}

static void keep_higher(uint64_t *into, uint64_t other) {
    if ((int64_t)be64toh(other) > (int64_t)be64toh(*into)) *into = other;
}

static void combine(ballot_frame *into, const ballot_frame *other) {
    keep_lower(&into->epoch_min, other->epoch_min);
    keep_higher(&into->epoch_max, other->epoch_max);
    keep_lower(&into->step_min, other->step_min);
    keep_higher(&into->step_max, other->step_max);
    keep_lower(&into->plan_min, other->plan_min);
    keep_higher(&into->plan_max, other->plan_max);
    into->staged = into->staged && other->staged;
    into->ready_leavers = htobe32(be32toh(into->ready_leavers) + be32toh(other->ready_leavers));
}

static int receive(tmd_link *link, ballot_frame *into, uint32_t epoch, uint8_t kind, tmd_outcome *outcome) {
    tmd_frame frame = {.at = (uint8_t *)into, .bytes = sizeof *into};
    tmd_receiver receiver = {.link = link, .frames = &frame, .count = 1};
    return tmd_transfer(NULL, 0, &receiver, epoch, kind, outcome);
}

static int send_frame(tmd_link *link, ballot_frame *from, uint32_t epoch, uint8_t kind, tmd_outcome *outcome) {
    tmd_frame frame = {.at = (uint8_t *)from, .bytes = sizeof *from};
    tmd_sender sender = {.link = link, .frames = &frame, .count = 1, .lead = 1};
    tmd_receiver nothing = {.count = 0};
    return tmd_transfer(&sender, 1, &nothing, epoch, kind, outcome);
}

/* `ballot` (56 bytes) is this member's and ends as the result. No parent: the root. `sent`: a frame of the ballot may have left.
   `below`: why a child was not told the result, which stands all the same. 0: there is a result, -1: it broke, see `outcome`. */
TMD_API int tmd_vote(tmd_link *parent, tmd_link *const *children, size_t n_children, uint8_t *ballot, uint32_t epoch, int32_t *sent,
                     tmd_outcome *outcome, tmd_outcome *below) {
    ballot_frame own, theirs;
    memcpy(&own, ballot, sizeof own);
    for (size_t i = 0; i < n_children; i++) {
        if (receive(children[i], &theirs, epoch, KIND_BALLOT, outcome)) return -1;
        combine(&own, &theirs);
    }
    if (parent) {
        *sent = 1;
        if (send_frame(parent, &own, epoch, KIND_BALLOT, outcome)) return -1;
        if (receive(parent, &own, epoch, KIND_RESULT, outcome)) return -1;
    }
    *sent = 1;
    memcpy(ballot, &own, sizeof own);
    for (size_t i = 0; i < n_children; i++) send_frame(children[i], &own, epoch, KIND_RESULT, below);
    return 0;
}
