/* One frame at a time on one link: header (see transport/wire.py), then payload. */

#include "stream.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

enum {
    /* What is combined goes through a buffer that stays in the processor's cache. */
    PIECE_BYTES = 128 << 10,
    /* Up to here header and payload come with one system call, and the copy costs less than a second one. */
    SMALL_BYTES = 16 << 10,
    /* In front of the payload in that buffer, so that elements are aligned. */
    LEAD_BYTES = 64,
};

static const uint8_t stop_frame[TMD_HEADER_BYTES] = {'T', 'M', 'D', '1', TMD_KIND_STOP};
static _Thread_local _Alignas(64) uint8_t landing[LEAD_BYTES + PIECE_BYTES];

int tmd_end(tmd_outcome *outcome, int code, const tmd_link *link, int error) {
    outcome->code = code;
    outcome->link = (uint64_t)(uintptr_t)link;
    outcome->error = error;
    return -1;
}

static void put_header(uint8_t *header, uint8_t kind, uint32_t epoch, uint64_t sequence, uint32_t bytes) {
    uint32_t words[4] = {htonl(epoch), htonl((uint32_t)(sequence >> 32)), htonl((uint32_t)sequence), htonl(bytes)};
    memcpy(header, stop_frame, 4);
    header[4] = kind;
    header[5] = header[6] = header[7] = 0;
    memcpy(header + 8, words, sizeof words);
}

/* Sends what fits without waiting. 1: bytes left or a frame is out, 0: no room, -1: over, see the outcome. */
int tmd_push(tmd_sender *sender, uint32_t epoch, uint8_t kind, tmd_outcome *outcome) {
    tmd_link *link = sender->link;
    const tmd_frame *frame = &sender->frames[sender->done];
    if (atomic_load_explicit(&link->ending, memory_order_relaxed)) return tmd_end(outcome, TMD_ENDING, link, 0);
    if (!link->unsent) {
        put_header(sender->header, kind, epoch, link->sent++, frame->bytes);
        link->unsent = TMD_HEADER_BYTES + (uint64_t)frame->bytes;
        sender->begun = 1;
    } else if (!sender->begun) {
        return tmd_end(outcome, TMD_BROKEN_OFF, link, 0);
    }
    struct iovec parts[2];
    size_t number = 0, payload_left = link->unsent;
    if (link->unsent > frame->bytes) {
        size_t header_left = link->unsent - frame->bytes;
        parts[number++] = (struct iovec){sender->header + TMD_HEADER_BYTES - header_left, header_left};
        payload_left = frame->bytes;
    }
    if (payload_left) parts[number++] = (struct iovec){frame->at + frame->bytes - payload_left, payload_left};
    ssize_t count = tmd_put(link, parts, number);
    if (count < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK) return tmd_end(outcome, TMD_SEND_FAILED, link, errno);
        sender->full = 1;
        return 0;
    }
    link->unsent -= (uint64_t)count;
    if (!link->unsent) sender->done++;
    return 1;
}

/* At least one byte; 0 if there is none and `wait` is not set, -1: over. Before the header is known nothing is waited for that
   might not come. */
static ssize_t take(tmd_receiver *receiver, void *into, size_t bytes, int wait, tmd_outcome *outcome) {
    tmd_link *link = receiver->link;
    int flags = !wait ? MSG_DONTWAIT : receiver->filled < TMD_HEADER_BYTES ? 0 : MSG_WAITALL;
    ssize_t count = tmd_get(link, into, bytes, flags);
    if (count > 0) return count;
    outcome->stopped = link->stopped || memcmp(receiver->last, stop_frame, TMD_HEADER_BYTES) == 0;
    if (count == 0) return tmd_end(outcome, TMD_CLOSED, link, 0);
    if (errno != EAGAIN && errno != EWOULDBLOCK) return tmd_end(outcome, TMD_RECEIVE_FAILED, link, errno);
    return wait ? tmd_end(outcome, TMD_SILENT, link, 0) : 0;
}

/* A sender that breaks a frame off may put a STOP behind what it sent of it. */
static void remember_last(tmd_receiver *receiver, const uint8_t *data, size_t bytes) {
    size_t kept = bytes < TMD_HEADER_BYTES ? TMD_HEADER_BYTES - bytes : 0;
    memmove(receiver->last, receiver->last + TMD_HEADER_BYTES - kept, kept);
    memcpy(receiver->last + kept, data + bytes - (TMD_HEADER_BYTES - kept), TMD_HEADER_BYTES - kept);
}

static int check(tmd_receiver *receiver, uint32_t epoch, uint8_t kind, tmd_outcome *outcome) {
    uint8_t expected[TMD_HEADER_BYTES];
    uint32_t bytes = receiver->frames[receiver->done].bytes;
    put_header(expected, kind, epoch, receiver->link->received, bytes);
    if (memcmp(receiver->header, expected, TMD_HEADER_BYTES) == 0) return 0;
    memcpy(outcome->header, receiver->header, TMD_HEADER_BYTES);
    outcome->expected_bytes = bytes;
    return tmd_end(outcome, TMD_OTHER_HEADER, receiver->link, 0);
}

/* The payload's bytes that lie in the buffer, behind `combined`, are `bytes` in number; keeps what is no whole element. */
static void combine(tmd_receiver *receiver, const tmd_frame *frame, size_t bytes) {
    const tmd_reduction *how = &receiver->reduction;
    uint8_t *data = landing + LEAD_BYTES;
    size_t whole = bytes / how->element_bytes, used = whole * how->element_bytes;
    uint8_t *into = frame->at + receiver->combined;
    how->combine(into, data, whole);
    if (frame->divide) tmd_divide(how->type, into, whole, how->divisor);
    receiver->combined += used;
    memmove(data, data + used, bytes - used);
}

/* Through the buffer: first the header with as much of the payload as fits, then piece by piece. */
static int pull_through_buffer(tmd_receiver *receiver, const tmd_frame *frame, uint32_t epoch, uint8_t kind, int wait,
                               tmd_outcome *outcome) {
    const size_t total = TMD_HEADER_BYTES + (size_t)frame->bytes;
    uint8_t *data = landing + LEAD_BYTES, *start = data - TMD_HEADER_BYTES;
    size_t before = receiver->filled;
    /* Only a header that came in parts is carried over in the receiver: the buffer belongs to the thread. */
    if (before < TMD_HEADER_BYTES) {
        memcpy(start, receiver->header, before);
        size_t wanted = total < TMD_HEADER_BYTES + (size_t)PIECE_BYTES ? total : TMD_HEADER_BYTES + (size_t)PIECE_BYTES;
        ssize_t count = take(receiver, start + before, wanted - before, wait, outcome);
        if (count <= 0) return (int)count;
        receiver->filled += (size_t)count;
        size_t header = receiver->filled < TMD_HEADER_BYTES ? receiver->filled : TMD_HEADER_BYTES;
        memcpy(receiver->header, start, header);
        if (header < TMD_HEADER_BYTES) return 1;
        if (check(receiver, epoch, kind, outcome)) return -1;
    } else {
        size_t kept = receiver->filled - TMD_HEADER_BYTES - receiver->combined;
        size_t left = total - receiver->filled, room = PIECE_BYTES - kept;
        ssize_t count = take(receiver, data + kept, left < room ? left : room, wait, outcome);
        if (count <= 0) return (int)count;
        receiver->filled += (size_t)count;
    }
    size_t here = receiver->filled - TMD_HEADER_BYTES - receiver->combined;
    if (before < TMD_HEADER_BYTES) before = TMD_HEADER_BYTES;
    size_t came = receiver->filled - before;
    remember_last(receiver, data + here - came, came);
    if (frame->combine) combine(receiver, frame, here);
    else if (receiver->filled == total && frame->bytes) memcpy(frame->at, data, frame->bytes);
    return 1;
}

/* The payload straight into place. */
static int pull_into_place(tmd_receiver *receiver, const tmd_frame *frame, uint32_t epoch, uint8_t kind, int wait,
                           tmd_outcome *outcome) {
    size_t filled = receiver->filled;
    int in_header = filled < TMD_HEADER_BYTES;
    uint8_t *into = in_header ? receiver->header + filled : frame->at + (filled - TMD_HEADER_BYTES);
    size_t left = in_header ? TMD_HEADER_BYTES - filled : TMD_HEADER_BYTES + (size_t)frame->bytes - filled;
    ssize_t count = take(receiver, into, left, wait, outcome);
    if (count <= 0) return (int)count;
    receiver->filled += (size_t)count;
    if (!in_header) remember_last(receiver, into, (size_t)count);
    else if (receiver->filled == TMD_HEADER_BYTES) return check(receiver, epoch, kind, outcome) ? -1 : 1;
    return 1;
}

/* Reads on in the current frame; with `wait` until something came. 1: something came, 0: there is nothing, -1: over. */
int tmd_pull(tmd_receiver *receiver, uint32_t epoch, uint8_t kind, int wait, tmd_outcome *outcome) {
    const tmd_frame *frame = &receiver->frames[receiver->done];
    if (!receiver->filled) memset(receiver->last, 0, sizeof receiver->last);
    int small = frame->combine || frame->bytes <= SMALL_BYTES;
    int came = (small ? pull_through_buffer : pull_into_place)(receiver, frame, epoch, kind, wait, outcome);
    if (came > 0 && receiver->filled == TMD_HEADER_BYTES + (size_t)frame->bytes) {
        receiver->link->received++;
        receiver->done++;
        receiver->filled = receiver->combined = 0;
    }
    return came;
}
