/* The bytes of a link, as the frames above see them: like those of a socket, whichever way they go. */

#ifndef TMD_STREAM_H
#define TMD_STREAM_H

#include "native.h"

#include <sys/types.h>
#include <sys/uio.h>

/* shared.c: a link with memory, as a socket */
ssize_t tmd_shared_send(tmd_link *link, const struct iovec *parts, size_t n);
ssize_t tmd_shared_receive(tmd_link *link, void *into, size_t bytes, int flags);
short tmd_shared_ready(const tmd_link *link, short events);
short tmd_shared_doze(tmd_link *link, short events);
void tmd_shared_rise(tmd_link *link, short events);
ssize_t tmd_shared_hear(tmd_link *link, int flags);

/* stream.c: any link */
ssize_t tmd_put(tmd_link *link, const struct iovec *parts, size_t n);
ssize_t tmd_get(tmd_link *link, void *into, size_t bytes, int flags);
int tmd_wait(tmd_link *const *links, short *events, size_t n, int64_t timeout_ms);

#endif
