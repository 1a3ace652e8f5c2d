/* What the event plugin tells the tmd daemon, and when: one JSON object in each datagram (docs/protocol.md).

   Pure: no Slurm calls, no allocation, no I/O; so fuzz_node_event.c can drive it. Whatever bytes Slurm holds, a datagram is
   valid JSON in UTF-8 of at most TMD_EVENT_MAX_BYTES. */

#ifndef TMD_NODE_EVENT_H
#define TMD_NODE_EVENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { TMD_EVENT_MAX_BYTES = 1024, TMD_EVENT_NODE_BYTES = 128, TMD_EVENT_REASON_BYTES = 512 };

/* A node as slurmctld knows it; the strings are Slurm's own, either may be NULL. */
typedef struct {
    const char *name;
    uint32_t state; /* base and flags, as in node_info_t.node_state */
    const char *reason;
} node_view;

/* Whether a change is worth a datagram. Jobs that come and go on healthy nodes are not: only what drains, fails, is down or is to be
   rebooted or maintained, what is no longer, and on such nodes every change, so that a node that was given back is seen. */
bool node_event_matters(const node_view *before, const node_view *after);

/* Writes `{"event":"node",…}` and a final zero into `out`. Node name and reason are cut to the limits above. Returns the length. */
size_t node_event_format(char out[TMD_EVENT_MAX_BYTES], const node_view *node, struct timespec at);

/* Writes `{"event":"resync",…}`: the receiver may have missed something and should ask Slurm. `lost` datagrams could not be
   delivered since the last one that could; 0: the watcher has just begun. Returns the length. */
size_t node_event_format_resync(char out[TMD_EVENT_MAX_BYTES], uint64_t lost, struct timespec at);

#endif
