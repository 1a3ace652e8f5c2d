/* Two rings of bytes in memory that both ends of a link map, one for each direction; the link's socket wakes whoever waits.

   Each end writes in one ring and reads in the other. It keeps its own position to itself and only tells it to the peer, and
   checks what the peer tells, so nothing that the peer writes leads out of the memory. Whoever is about to sleep says so in the
   ring and looks once more; the other side then sends one byte, a bell. Nothing else travels on the socket but the STOP, and its
   end is the end of the link: what was written before that is read first. */

#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    /* In front of the two rings: their positions. */
    FRONT_BYTES = 4096,
    LEAST_RING_BYTES = 4096,
    MOST_RING_BYTES = 1 << 26,
    /* The other side may go on once this much has been copied. */
    PIECE_BYTES = 64 << 10,
    SEALS = F_SEAL_SHRINK | F_SEAL_GROW,
};

static const uint8_t bell = 0;

/* Positions count bytes from the beginning. Each line of the cache is written by one side; only a mark is taken back by the other. */
typedef struct {
    _Alignas(64) _Atomic uint64_t put;
    _Atomic uint32_t writer_sleeps;
    _Alignas(64) _Atomic uint64_t taken;
    _Atomic uint32_t reader_sleeps;
} ring;

struct tmd_shared {
    uint8_t *memory;
    uint64_t ring_bytes; /* a power of two */
    ring *out, *in;
    uint8_t *out_bytes, *in_bytes;
    uint64_t put, taken; /* this end's positions */
    int gone;            /* the socket is at its end */
};

/* ---------------------------------------------------------------- made and given back */

static int fits(uint64_t ring_bytes) {
    return ring_bytes >= LEAST_RING_BYTES && ring_bytes <= MOST_RING_BYTES && !(ring_bytes & (ring_bytes - 1));
}

static size_t memory_bytes(uint64_t ring_bytes) { return FRONT_BYTES + 2 * ring_bytes; }

/* `side`: which of the rings is written here. NULL: errno says why. */
static tmd_shared *map(int fd, uint64_t ring_bytes, int side) {
    tmd_shared *shared = calloc(1, sizeof *shared);
    if (!shared) return NULL;
    uint8_t *memory = mmap(NULL, memory_bytes(ring_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        free(shared);
        return NULL;
    }
    /* A forked child has no part in the link. */
    madvise(memory, memory_bytes(ring_bytes), MADV_DONTFORK);
    ring *rings[2] = {(ring *)memory, (ring *)memory + 1};
    uint8_t *bytes[2] = {memory + FRONT_BYTES, memory + FRONT_BYTES + ring_bytes};
    *shared = (tmd_shared){.memory = memory,
                           .ring_bytes = ring_bytes,
                           .out = rings[side],
                           .in = rings[!side],
                           .out_bytes = bytes[side],
                           .in_bytes = bytes[!side]};
    return shared;
}

/* New memory. Returns its descriptor, for the peer, or a negative errno. */
TMD_API int tmd_shared_create(uint64_t ring_bytes, tmd_shared **made) {
    if (!fits(ring_bytes)) return -EINVAL;
    int fd = memfd_create("tmd-link", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -errno;
    /* Reserved now: later the lack of it would end the process. Sealed, so that no end can take it away from the other. */
    int error;
    do error = posix_fallocate(fd, 0, (off_t)memory_bytes(ring_bytes));
    while (error == EINTR);
    if (!error && fcntl(fd, F_ADD_SEALS, SEALS)) error = errno;
    if (!error && !(*made = map(fd, ring_bytes, 0))) error = errno;
    if (!error) return fd;
    close(fd);
    return -error;
}

/* The memory behind a descriptor that the peer sent, which stays the caller's. Returns 0 or a negative errno. */
TMD_API int tmd_shared_attach(int fd, uint64_t ring_bytes, tmd_shared **made) {
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    if (!fits(ring_bytes) || seals < 0 || (seals & SEALS) != SEALS) return -EINVAL;
    if (fstat(fd, &status)) return -errno;
    if (status.st_size != (off_t)memory_bytes(ring_bytes)) return -EINVAL;
    *made = map(fd, ring_bytes, 1);
    return *made ? 0 : -errno;
}

/* Nobody uses it any more in this process, which is the one that made or attached it. */
TMD_API int tmd_shared_release(tmd_shared *shared) {
    munmap(shared->memory, memory_bytes(shared->ring_bytes));
    free(shared);
    return 0;
}

/* ---------------------------------------------------------------- positions */

/* How many bytes may be written; -1: what the peer says is impossible. */
static int64_t room(const tmd_shared *shared) {
    uint64_t used = shared->put - atomic_load_explicit(&shared->out->taken, memory_order_acquire);
    return used > shared->ring_bytes ? -1 : (int64_t)(shared->ring_bytes - used);
}

/* How many bytes can be read; -1: what the peer says is impossible. */
static int64_t unread(const tmd_shared *shared) {
    uint64_t here = atomic_load_explicit(&shared->in->put, memory_order_acquire) - shared->taken;
    return here > shared->ring_bytes ? -1 : (int64_t)here;
}

/* Which of these events are there. A writer sleeps until half of the ring is free, not for each piece that is taken. */
short tmd_shared_ready(const tmd_link *link, short events) {
    const tmd_shared *shared = link->shared;
    short ready = 0;
    if (events & POLLIN && (shared->gone || link->stopped || unread(shared))) ready |= POLLIN;
    if (events & POLLOUT) {
        int64_t free = room(shared);
        if (free < 0 || (uint64_t)free >= shared->ring_bytes / 2) ready |= POLLOUT;
    }
    return ready;
}

/* ---------------------------------------------------------------- bells */

/* 0, or -1 if the peer ended the link or reads it no more. A full socket has bells enough. */
static int ring_bell(tmd_link *link, _Atomic uint32_t *sleeps) {
    if (!atomic_exchange_explicit(sleeps, 0, memory_order_acq_rel)) return 0;
    ssize_t count;
    do count = send(link->fd, &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (count < 0 && errno == EINTR);
    return count < 0 && errno != EAGAIN && errno != EWOULDBLOCK ? -1 : 0;
}

/* The calling thread is about to sleep until one of these events. Returns those that are there already. */
short tmd_shared_doze(tmd_link *link, short events) {
    tmd_shared *shared = link->shared;
    if (events & POLLIN) atomic_store_explicit(&shared->in->reader_sleeps, 1, memory_order_relaxed);
    if (events & POLLOUT) atomic_store_explicit(&shared->out->writer_sleeps, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    return tmd_shared_ready(link, events);
}

/* It is awake: no bell for it. */
void tmd_shared_rise(tmd_link *link, short events) {
    tmd_shared *shared = link->shared;
    if (events & POLLIN) atomic_store_explicit(&shared->in->reader_sleeps, 0, memory_order_relaxed);
    if (events & POLLOUT) atomic_store_explicit(&shared->out->writer_sleeps, 0, memory_order_relaxed);
}

/* Takes bells from the socket, or its end. As recv() with these flags. */
ssize_t tmd_shared_hear(tmd_link *link, int flags) {
    uint8_t heard[256];
    ssize_t count;
    do count = recv(link->fd, heard, sizeof heard, flags);
    while (count < 0 && errno == EINTR);
    for (ssize_t i = 0; i < count; i++) {
        if (heard[i] != bell) link->stopped = 1;
    }
    /* A peer that dies with bells unread resets the connection; that is an end like any other. */
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) link->shared->gone = 1;
    return count;
}

/* ---------------------------------------------------------------- bytes */

static void copy_in(tmd_shared *shared, const uint8_t *from, size_t bytes) {
    size_t at = shared->put & (shared->ring_bytes - 1), first = shared->ring_bytes - at;
    if (first > bytes) first = bytes;
    memcpy(shared->out_bytes + at, from, first);
    memcpy(shared->out_bytes, from + first, bytes - first);
    shared->put += bytes;
}

static void copy_out(tmd_shared *shared, uint8_t *into, size_t bytes) {
    size_t at = shared->taken & (shared->ring_bytes - 1), first = shared->ring_bytes - at;
    if (first > bytes) first = bytes;
    memcpy(into, shared->in_bytes + at, first);
    memcpy(into + first, shared->in_bytes, bytes - first);
    shared->taken += bytes;
}

/* 0, or -1 if the peer is gone. */
static int tell_reader(tmd_link *link) {
    ring *out = link->shared->out;
    atomic_store_explicit(&out->put, link->shared->put, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load_explicit(&out->reader_sleeps, memory_order_relaxed) ? ring_bell(link, &out->reader_sleeps) : 0;
}

static void tell_writer(tmd_link *link) {
    tmd_shared *shared = link->shared;
    atomic_store_explicit(&shared->in->taken, shared->taken, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&shared->in->writer_sleeps, memory_order_acquire)) return;
    if ((uint64_t)unread(shared) <= shared->ring_bytes / 2) ring_bell(link, &shared->in->writer_sleeps);
}

/* As sendmsg() that does not wait. EPROTO: the peer's position is impossible. */
ssize_t tmd_shared_send(tmd_link *link, const struct iovec *parts, size_t n) {
    tmd_shared *shared = link->shared;
    int64_t free = room(shared);
    if (free <= 0) {
        errno = free < 0 ? EPROTO : EAGAIN;
        return -1;
    }
    size_t left = (size_t)free, untold = 0;
    for (size_t i = 0; i < n; i++) {
        const uint8_t *from = parts[i].iov_base;
        size_t bytes = parts[i].iov_len < left ? parts[i].iov_len : left;
        left -= bytes;
        while (bytes) {
            size_t piece = bytes < PIECE_BYTES ? bytes : PIECE_BYTES;
            copy_in(shared, from, piece);
            from += piece;
            bytes -= piece;
            untold += piece;
            if (untold >= PIECE_BYTES) {
                if (tell_reader(link)) return -1;
                untold = 0;
            }
        }
    }
    if (untold && tell_reader(link)) return -1;
    return free - (int64_t)left;
}

/* What is there, at most `bytes`; 0: nothing, -1: the peer's position is impossible. */
static ssize_t take(tmd_link *link, uint8_t *into, size_t bytes) {
    int64_t here = unread(link->shared);
    if (here < 0) {
        errno = EPROTO;
        return -1;
    }
    size_t count = (size_t)here < bytes ? (size_t)here : bytes;
    for (size_t left = count; left;) {
        size_t piece = left < PIECE_BYTES ? left : PIECE_BYTES;
        copy_out(link->shared, into, piece);
        tell_writer(link);
        into += piece;
        left -= piece;
    }
    return (ssize_t)count;
}

/* As recv() with MSG_DONTWAIT, MSG_WAITALL or no flag; how long it waits is the socket's own timeout. */
ssize_t tmd_shared_receive(tmd_link *link, void *into, size_t bytes, int flags) {
    size_t got = 0;
    for (;;) {
        /* What was written before the end came is in the ring by now. */
        int over = link->shared->gone || link->stopped;
        ssize_t count = take(link, (uint8_t *)into + got, bytes - got);
        if (count < 0) return -1;
        got += (size_t)count;
        if (got == bytes || over || (got && !(flags & MSG_WAITALL))) return (ssize_t)got;
        if (flags & MSG_DONTWAIT) {
            errno = EAGAIN;
            return -1;
        }
        int silent = !tmd_shared_doze(link, POLLIN) && tmd_shared_hear(link, 0) < 0 && !link->shared->gone;
        tmd_shared_rise(link, POLLIN);
        if (silent) {
            errno = EAGAIN;
            return got ? (ssize_t)got : -1;
        }
    }
}
