/* Frames in both directions at once, in one thread: whichever direction can go on goes on. */

#include "stream.h"

#include <errno.h>
#include <poll.h>

enum { HANG_UP = POLLRDHUP | POLLHUP | POLLERR };

static int may_send(const tmd_sender *sender, const tmd_receiver *receiver) {
    return sender->done < sender->count && sender->done < sender->lead + receiver->done;
}

/* Sends until the links take no more, or the next frame is not there yet. 1: something left. */
static int send_all(tmd_sender *senders, size_t n, const tmd_receiver *receiver, uint32_t epoch, uint8_t kind, tmd_outcome *outcome) {
    int moved = 0;
    for (size_t i = 0; i < n; i++) {
        while (!senders[i].full && may_send(&senders[i], receiver)) {
            if (tmd_push(&senders[i], epoch, kind, outcome) < 0) return -1;
            if (!senders[i].full) moved = 1;
        }
    }
    return moved;
}

/* Waits until one direction can go on. Of many links to send on it looks at the first ones that are not done. */
static int wait_for_any(tmd_sender *senders, size_t n, const tmd_receiver *receiver, tmd_outcome *outcome) {
    tmd_link *links[TMD_MAX_POLLED];
    short events[TMD_MAX_POLLED];
    tmd_sender *sending[TMD_MAX_SENDERS];
    size_t number = 0;
    for (size_t i = 0; i < n && number < TMD_MAX_SENDERS; i++) {
        if (!may_send(&senders[i], receiver)) continue;
        sending[number] = &senders[i];
        links[number] = senders[i].link;
        events[number++] = POLLOUT | POLLRDHUP;
    }
    size_t sends = number;
    int receiving = receiver->done < receiver->count;
    if (receiving) {
        links[number] = receiver->link;
        events[number++] = POLLIN;
    }
    const tmd_link *patient = links[number - 1];
    int ready = tmd_wait(links, events, number, patient->timeout_ms);
    if (ready < 0) return tmd_end(outcome, TMD_RECEIVE_FAILED, patient, errno);
    if (ready == 0) return tmd_end(outcome, receiving ? TMD_STUCK : TMD_NO_ROOM, patient, 0);
    for (size_t i = 0; i < sends; i++) {
        /* A peer that went away may have left something to read first: its last words. */
        int unread = receiving && sending[i]->link == receiver->link && events[sends] & POLLIN;
        if (events[i] & HANG_UP && !unread) return tmd_end(outcome, TMD_HUNG_UP, sending[i]->link, 0);
        if (events[i] & POLLOUT) sending[i]->full = 0;
    }
    return 0;
}

static int transfer(tmd_sender *senders, size_t n, tmd_receiver *receiver, int send_rest, uint32_t epoch, uint8_t kind,
                    tmd_outcome *outcome) {
    for (;;) {
        int moved = send_all(senders, n, receiver, epoch, kind, outcome);
        if (moved < 0) return -1;
        int open = 0;
        for (size_t i = 0; i < n; i++) open |= may_send(&senders[i], receiver);
        if (receiver->done < receiver->count) {
            /* With nothing to send, the receive itself may wait. */
            int came = tmd_pull(receiver, epoch, kind, !open, outcome);
            if (came < 0) return -1;
            moved |= came;
        } else if (!open || !send_rest) {
            return 0;
        }
        if (!moved && wait_for_any(senders, n, receiver, outcome)) return -1;
    }
}

/* Sends all frames of all senders and receives all of the receiver. 0: done, -1: over, see the outcome. */
int tmd_transfer(tmd_sender *senders, size_t n, tmd_receiver *receiver, uint32_t epoch, uint8_t kind, tmd_outcome *outcome) {
    return transfer(senders, n, receiver, 1, epoch, kind, outcome);
}

/* Receives all of the receiver, and sends meanwhile what finds room; the senders may have something left afterwards. */
int tmd_take_in(tmd_sender *senders, size_t n, tmd_receiver *receiver, uint32_t epoch, uint8_t kind, tmd_outcome *outcome) {
    return transfer(senders, n, receiver, 0, epoch, kind, outcome);
}
