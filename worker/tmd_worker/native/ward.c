/* What a ward sends, as long as it is small: whole messages, taken from its socket as they lie there (transport/ward.py). */

#include "native.h"

#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

enum { KIND_RECORD = 5, KIND_TAIL = 6, PREFIX_BYTES = 16 };
enum { HEARD_RECORD = 0, HEARD_NOTHING_MORE = 1, NOT_SMALL = 2 };

static uint32_t word(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return be32toh(value);
}

static uint64_t double_word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return be64toh(value);
}

/* The size of the message that begins here, if it is whole, in one frame, and the one that comes next; else 0. */
static size_t whole_message(const uint8_t *at, size_t there, uint64_t sequence, uint32_t lowest_epoch) {
    if (there < TMD_HEADER_BYTES + PREFIX_BYTES || memcmp(at, "TMD1", 4) || (at[4] != KIND_RECORD && at[4] != KIND_TAIL)) return 0;
    uint64_t payload = word(at + 20), total = double_word(at + TMD_HEADER_BYTES + 8);
    if (word(at + 8) < lowest_epoch || double_word(at + 12) != sequence) return 0;
    if (payload < PREFIX_BYTES || total != payload - PREFIX_BYTES || payload > there - TMD_HEADER_BYTES) return 0;
    return TMD_HEADER_BYTES + (size_t)payload;
}

/* 1: there is something to read, or the end, 0: `wake` rings or the time is up. */
static int wait_for(const tmd_link *ward, int wake, int64_t timeout_ms) {
    struct pollfd polled[2] = {{.fd = ward->fd, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
    int count = poll(polled, 2, timeout_ms < INT32_MAX ? (int)timeout_ms : INT32_MAX);
    return count > 0 && polled[0].revents;
}

/* Takes whole messages up to the next RECORD, waiting for it; `taken` bytes of them are in `into` then. HEARD_RECORD: the last is one;
   HEARD_NOTHING_MORE: the wait is over; NOT_SMALL: what comes next is another thing, or the end, and was left where it is. */
TMD_API int tmd_hear_ward(tmd_link *ward, int wake, uint8_t *into, size_t capacity, uint32_t lowest_epoch, int64_t timeout_ms,
                          uint64_t *taken) {
    size_t used = *taken = 0;
    for (;;) {
        ssize_t there = recv(ward->fd, into + used, capacity - used, MSG_PEEK | MSG_DONTWAIT);
        if (there < 0 && errno == EINTR) continue;
        if (there < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (wait_for(ward, wake, timeout_ms)) continue;
            return HEARD_NOTHING_MORE;
        }
        size_t found = 0, size;
        uint8_t kind = 0;
        while (there > 0 && kind != KIND_RECORD) {
            size = whole_message(into + used + found, (size_t)there - found, ward->received, lowest_epoch);
            if (!size) break;
            kind = into[used + found + 4];
            found += size;
            ward->received++;
        }
        if (!found) return NOT_SMALL;
        if (recv(ward->fd, into + used, found, MSG_DONTWAIT) != (ssize_t)found) return NOT_SMALL; /* cannot be: nobody else reads */
        *taken = used += found;
        if (kind == KIND_RECORD) return HEARD_RECORD;
    }
}
