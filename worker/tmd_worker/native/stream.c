/* The bytes of a link, whichever way they go: through its socket, or through memory that both ends share. */

#include "stream.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

enum { HANG_UP = POLLRDHUP | POLLHUP | POLLERR | POLLNVAL };

/* As sendmsg() that does not wait. */
ssize_t tmd_put(tmd_link *link, const struct iovec *parts, size_t n) {
    if (link->shared) return tmd_shared_send(link, parts, n);
    struct msghdr message = {.msg_iov = (struct iovec *)parts, .msg_iovlen = n};
    ssize_t count;
    do count = sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    return count;
}

/* As recv(). */
ssize_t tmd_get(tmd_link *link, void *into, size_t bytes, int flags) {
    if (link->shared) return tmd_shared_receive(link, into, bytes, flags);
    ssize_t count;
    do count = recv(link->fd, into, bytes, flags);
    while (count < 0 && errno == EINTR);
    return count;
}

static int64_t now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* Once on every socket: `found` gets what is there. As poll(). */
static int poll_sockets(tmd_link *const *links, const short *events, short *found, size_t n, int timeout_ms) {
    struct pollfd polled[TMD_MAX_POLLED];
    for (size_t i = 0; i < n; i++) {
        short wanted = links[i]->shared ? (short)(POLLIN | (events[i] & POLLRDHUP)) : events[i];
        polled[i] = (struct pollfd){.fd = links[i]->fd, .events = wanted};
    }
    int count = poll(polled, (nfds_t)n, timeout_ms);
    if (count <= 0) return count;
    for (size_t i = 0; i < n; i++) {
        if (links[i]->shared && polled[i].revents) tmd_shared_hear(links[i], MSG_DONTWAIT);
    }
    for (size_t i = 0; i < n; i++) {
        found[i] = polled[i].revents;
        if (links[i]->shared) found[i] = (short)((found[i] & HANG_UP) | tmd_shared_ready(links[i], events[i]));
    }
    return count;
}

/* Waits until one of the events (POLLIN, POLLOUT, POLLRDHUP) is there on its link, and puts those that are in their place. Returns
   1, 0 after the timeout (0: for ever), or -1. At most TMD_MAX_POLLED links. */
TMD_API int tmd_wait(tmd_link *const *links, short *events, size_t n, int64_t timeout_ms) {
    short found[TMD_MAX_POLLED];
    int64_t deadline_ms = timeout_ms ? now_ms() + timeout_ms : 0;
    for (size_t i = 0; i < n; i++) {
        if (links[i]->fd >= 0) continue;
        errno = EBADF; /* closed by this side: poll() would take no notice of it */
        return -1;
    }
    for (;;) {
        int some = 0, count = 1;
        for (size_t i = 0; i < n; i++) {
            found[i] = links[i]->shared ? tmd_shared_doze(links[i], events[i]) : 0;
            some |= found[i];
        }
        if (!some) {
            int64_t left_ms = deadline_ms ? deadline_ms - now_ms() : -1;
            count = poll_sockets(links, events, found, n, deadline_ms && left_ms < 0 ? 0 : (int)left_ms);
        }
        for (size_t i = 0; i < n; i++) {
            if (links[i]->shared) tmd_shared_rise(links[i], events[i]);
            some |= count > 0 ? found[i] : 0;
        }
        if (count < 0 && errno != EINTR) return -1;
        if (some || count == 0) {
            for (size_t i = 0; i < n; i++) events[i] = found[i];
            return some != 0;
        }
    }
}

/* For Python, which has one piece of memory at a time: the count, or a negative errno. */
TMD_API int tmd_write(tmd_link *link, const void *from, size_t bytes) {
    struct iovec part = {(void *)from, bytes < INT32_MAX ? bytes : INT32_MAX};
    ssize_t count = tmd_put(link, &part, 1);
    return count < 0 ? -errno : (int)count;
}

TMD_API int tmd_read(tmd_link *link, void *into, size_t bytes, int flags) {
    ssize_t count = tmd_get(link, into, bytes < INT32_MAX ? bytes : INT32_MAX, flags);
    return count < 0 ? -errno : (int)count;
}
