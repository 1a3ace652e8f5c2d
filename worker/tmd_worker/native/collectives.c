/* Whole collectives, each in one call: the same frames in the same order as the algorithms of transport/collectives.py, so that
   members with and without this library work together and get the same bits. */

#include "native.h"

#include <stdlib.h>

static size_t frames_in(uint64_t bytes) { return (bytes + TMD_MAX_PAYLOAD_BYTES - 1) / TMD_MAX_PAYLOAD_BYTES; }

/* Cuts a block into frames; returns the place behind the last. */
static tmd_frame *cut(tmd_frame *frames, uint8_t *block, uint64_t bytes, int combine, int divide) {
    for (uint64_t start = 0; start < bytes; start += TMD_MAX_PAYLOAD_BYTES) {
        uint64_t left = bytes - start;
        uint32_t size = left < TMD_MAX_PAYLOAD_BYTES ? (uint32_t)left : TMD_MAX_PAYLOAD_BYTES;
        *frames++ = (tmd_frame){.at = block + start, .bytes = size, .combine = (uint8_t)combine, .divide = (uint8_t)divide};
    }
    return frames;
}

static int reduction_of(tmd_reduction *reduction, int type, int operation, int divisor) {
    *reduction = (tmd_reduction){
        .combine = tmd_combiner_of(type, operation), .element_bytes = tmd_element_bytes(type), .type = type, .divisor = divisor};
    return operation == TMD_STORE || reduction->combine ? 0 : -1;
}

/* Sends a list of frames to one link while it receives another list from another link, or the same one. */
TMD_API int tmd_exchange(tmd_link *out, const tmd_frame *outgoing, size_t n_out, tmd_link *in, const tmd_frame *incoming,
                         size_t n_in, uint32_t epoch, uint8_t kind, tmd_outcome *outcome) {
    tmd_sender sender = {.link = out, .frames = outgoing, .count = n_out, .lead = n_out};
    tmd_receiver receiver = {.link = in, .frames = incoming, .count = n_in};
    return tmd_transfer(&sender, 1, &receiver, epoch, kind, outcome);
}

/* Around the ring: with an operation each block is reduced, in the order of the ring, and ends complete at the member of its
   number (divided, if there is a divisor); with `gather` every member ends with all blocks. What was received is sent on frame
   by frame, so the turns overlap. */
TMD_API int tmd_ring(tmd_link *following, tmd_link *previous, uint8_t *const *blocks, const uint64_t *bytes, int rank, int size,
                     int type, int operation, int divisor, int gather, uint32_t epoch, tmd_outcome *outcome) {
    tmd_reduction reduction;
    if (reduction_of(&reduction, type, operation, divisor)) return tmd_end(outcome, TMD_UNKNOWN, following, 0);
    int reduces = operation != TMD_STORE;
    size_t number = 0;
    for (int i = 0; i < size; i++) number += 2 * frames_in(bytes[i]);
    tmd_frame *frames = malloc((2 * number + 1) * sizeof *frames);
    if (!frames) return tmd_end(outcome, TMD_NO_MEMORY, following, 0);

    tmd_frame *incoming = frames, *in_end = incoming;
    tmd_frame *outgoing = frames + number, *out_end = outgoing;
    int first = reduces ? (rank + size - 1) % size : rank;
    out_end = cut(out_end, blocks[first], bytes[first], 0, 0);
    size_t lead = (size_t)(out_end - outgoing);
    int turns = (size - 1) * (reduces + gather);
    for (int turn = 0; turn < turns; turn++) {
        int block = (first + 2 * size - 1 - turn) % size;
        int reducing = reduces && turn < size - 1;
        in_end = cut(in_end, blocks[block], bytes[block], reducing, reducing && divisor > 1 && turn == size - 2);
        if (turn < turns - 1) out_end = cut(out_end, blocks[block], bytes[block], 0, 0);
    }
    tmd_sender sender = {.link = following, .frames = outgoing, .count = (size_t)(out_end - outgoing), .lead = lead};
    tmd_receiver receiver = {.link = previous, .frames = incoming, .count = (size_t)(in_end - incoming), .reduction = reduction};
    int result = tmd_transfer(&sender, 1, &receiver, epoch, TMD_KIND_DATA, outcome);
    free(frames);
    return result;
}

/* One frame up the tree, combined with the children's in their order, and with `back` the result down again. No parent: the
   root. Without an operation and without bytes it is a barrier. */
TMD_API int tmd_tree(tmd_link *parent, tmd_link *const *children, size_t n_children, uint8_t *data, uint32_t bytes, int type,
                     int operation, int divisor, int back, uint32_t epoch, tmd_outcome *outcome) {
    tmd_reduction reduction;
    if (reduction_of(&reduction, type, operation, divisor)) return tmd_end(outcome, TMD_UNKNOWN, parent, 0);
    tmd_receiver nothing = {.count = 0};
    tmd_frame up = {.at = data, .bytes = bytes, .combine = operation != TMD_STORE};
    tmd_frame down = {.at = data, .bytes = bytes};
    for (size_t i = 0; i < n_children; i++) {
        tmd_receiver receiver = {.link = children[i], .frames = &up, .count = 1, .reduction = reduction};
        if (tmd_transfer(NULL, 0, &receiver, epoch, TMD_KIND_DATA, outcome)) return -1;
    }
    if (parent) {
        tmd_sender sender = {.link = parent, .frames = &down, .count = 1, .lead = 1};
        tmd_receiver receiver = {.link = parent, .frames = &down, .count = 1};
        if (tmd_transfer(&sender, 1, &nothing, epoch, TMD_KIND_DATA, outcome)) return -1;
        if (!back) return 0;
        if (tmd_transfer(NULL, 0, &receiver, epoch, TMD_KIND_DATA, outcome)) return -1;
    } else if (divisor > 1) {
        tmd_divide(type, data, bytes / reduction.element_bytes, divisor);
    }
    for (size_t i = 0; i < n_children && back; i++) {
        tmd_sender sender = {.link = children[i], .frames = &down, .count = 1, .lead = 1};
        if (tmd_transfer(&sender, 1, &nothing, epoch, TMD_KIND_DATA, outcome)) return -1;
    }
    return 0;
}

/* Frame by frame from `source` (NULL: the data is here) to all of `targets`. */
TMD_API int tmd_broadcast(tmd_link *source, tmd_link *const *targets, size_t n_targets, uint8_t *data, uint64_t bytes, uint32_t epoch,
                          tmd_outcome *outcome) {
    size_t number = frames_in(bytes);
    tmd_frame *frames = malloc((number + 1) * sizeof *frames);
    if (!frames) return tmd_end(outcome, TMD_NO_MEMORY, source, 0);
    cut(frames, data, bytes, 0, 0);
    tmd_sender senders[TMD_MAX_SENDERS];
    for (size_t i = 0; i < n_targets; i++) {
        senders[i] = (tmd_sender){.link = targets[i], .frames = frames, .count = number, .lead = source ? 0 : number};
    }
    tmd_receiver receiver = {.link = source, .frames = frames, .count = source ? number : 0};
    int result = tmd_transfer(senders, n_targets, &receiver, epoch, TMD_KIND_DATA, outcome);
    free(frames);
    return result;
}

/* Sends to many links, as they have room, while it receives from others (or the same ones), one after the other. */
TMD_API int tmd_exchange_all(const tmd_piece *outgoing, size_t n_out, const tmd_piece *incoming, size_t n_in, uint32_t epoch,
                             tmd_outcome *outcome) {
    size_t number = 0;
    for (size_t i = 0; i < n_out; i++) number += frames_in(outgoing[i].bytes);
    for (size_t i = 0; i < n_in; i++) number += frames_in(incoming[i].bytes);
    tmd_frame *frames = malloc((number + 1) * sizeof *frames), *next = frames;
    tmd_sender *senders = malloc((n_out + 1) * sizeof *senders);
    int result = frames && senders ? 0 : tmd_end(outcome, TMD_NO_MEMORY, NULL, 0);
    for (size_t i = 0; !result && i < n_out; i++) {
        size_t count = frames_in(outgoing[i].bytes);
        senders[i] = (tmd_sender){.link = outgoing[i].link, .frames = next, .count = count, .lead = count};
        next = cut(next, outgoing[i].at, outgoing[i].bytes, 0, 0);
    }
    for (size_t i = 0; !result && i < n_in; i++) {
        tmd_receiver receiver = {.link = incoming[i].link, .frames = next, .count = frames_in(incoming[i].bytes)};
        next = cut(next, incoming[i].at, incoming[i].bytes, 0, 0);
        result = tmd_take_in(senders, n_out, &receiver, epoch, TMD_KIND_DATA, outcome);
    }
    tmd_receiver nothing = {.count = 0};
    if (!result) result = tmd_transfer(senders, n_out, &nothing, epoch, TMD_KIND_DATA, outcome);
    free(senders);
    free(frames);
    return result;
}

/* Of the sources from which this was compiled. */
TMD_API const char *tmd_digest(void) { return TMD_DIGEST; }
