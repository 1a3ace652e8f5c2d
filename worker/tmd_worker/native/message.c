/* Sends a message of send/recv: a MESSAGE frame with tag and size, then its bytes in DATA frames. */

#include "stream.h"

#include <errno.h>
#include <stdlib.h>

enum { PREFIX_BYTES = 16 };

/* The frames in front of the payload and what fits of it, in one system call, so that the receiver wakes up once. */
static int begin(tmd_link *link, const tmd_frame *frames, size_t number, uint64_t *done, uint32_t epoch, tmd_outcome *outcome) {
    if (atomic_load_explicit(&link->ending, memory_order_relaxed)) return tmd_end(outcome, TMD_ENDING, link, 0);
    uint8_t first[TMD_HEADER_BYTES], second[TMD_HEADER_BYTES];
    tmd_put_header(first, TMD_KIND_MESSAGE, epoch, link->sent, PREFIX_BYTES);
    struct iovec parts[4] = {{first, sizeof first}, {frames[0].at, PREFIX_BYTES}};
    if (number > 1) {
        tmd_put_header(second, TMD_KIND_DATA, epoch, link->sent + 1, frames[1].bytes);
        parts[2] = (struct iovec){second, sizeof second};
        parts[3] = (struct iovec){frames[1].at, frames[1].bytes};
    }
    ssize_t count = tmd_put(link, parts, number > 1 ? 4 : 2);
    if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : tmd_end(outcome, TMD_SEND_FAILED, link, errno);
    uint64_t left = (uint64_t)count;
    for (size_t i = 0; left && i < 2; i++) {
        uint64_t whole = TMD_HEADER_BYTES + (uint64_t)frames[i].bytes, went = left < whole ? left : whole;
        link->sent++;
        link->unsent = whole - went;
        *done += !link->unsent;
        left -= went;
    }
    return 0;
}

/* Goes on behind the `done` frames that are out, and the part of the next one that is: all of the message with `wait`, otherwise
   what the link has room for. Nothing else is sent on the link in between. 0, or -1: over, see the outcome. */
TMD_API int tmd_send_message(tmd_link *link, uint8_t *prefix, uint8_t *data, uint64_t bytes, uint64_t *done, int wait, uint32_t epoch,
                             tmd_outcome *outcome) {
    size_t number = 1 + tmd_frames_in(bytes);
    tmd_frame *frames = malloc(number * sizeof *frames);
    if (!frames) return tmd_end(outcome, TMD_NO_MEMORY, link, 0);
    frames[0] = (tmd_frame){.at = prefix, .bytes = PREFIX_BYTES};
    tmd_cut(frames + 1, data, bytes, 0, 0);
    int result = *done || link->unsent ? 0 : begin(link, frames, number, done, epoch, outcome);
    tmd_receiver nothing = {.count = 0};
    for (int full = 0; !result && !full && *done < number;) {
        uint8_t kind = *done ? TMD_KIND_DATA : TMD_KIND_MESSAGE;
        size_t count = *done ? number - *done : 1;
        tmd_sender sender = {.link = link, .frames = frames + *done, .count = count, .lead = count};
        if (link->unsent) tmd_put_header(sender.header, kind, epoch, link->sent - 1, sender.frames->bytes);
        if (wait) result = tmd_transfer(&sender, 1, &nothing, epoch, kind, outcome);
        while (!wait && !result && !sender.full && sender.done < count) result = tmd_push(&sender, epoch, kind, outcome) < 0 ? -1 : 0;
        full = sender.full && !wait;
        *done += sender.done;
    }
    free(frames);
    return result;
}
