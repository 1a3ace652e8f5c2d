/* What the files of the native core share, and what Python sees through ctypes (library.py mirrors the structures).

   Contract: no function here knows of Python or torch. Whoever calls holds the links: their descriptors stay open during the
   call, nobody else reads or writes on them, and another thread may at any time set `ending` and shut a descriptor down, which
   wakes the call. Memory is the caller's; a payload reaches it only after its header was found to be the expected one. */

#ifndef TMD_NATIVE_H
#define TMD_NATIVE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define TMD_API __attribute__((visibility("default")))

enum { TMD_HEADER_BYTES = 24, TMD_MAX_PAYLOAD_BYTES = 1 << 20, TMD_KIND_DATA = 1, TMD_KIND_STOP = 2, TMD_MAX_SENDERS = 8 };
enum { TMD_MAX_POLLED = TMD_MAX_SENDERS + 1 };

/* One end's view of the memory that carries a link's bytes. */
typedef struct tmd_shared tmd_shared;

/* One end of a connection. */
typedef struct {
    int32_t fd;              /* -1 once it is closed */
    _Atomic int32_t ending;  /* another thread closes the link: send nothing more */
    uint64_t sent, received; /* frames so far, per direction */
    uint64_t unsent;         /* bytes of the current outgoing frame that have not left */
    int64_t timeout_ms;      /* how long to wait without any progress; 0: for ever. The socket's own timeout is the same */
    tmd_shared *shared;      /* NULL: the socket carries the bytes */
    _Atomic int32_t stopped; /* the peer's STOP was read from the socket beside the memory */
} tmd_link;

/* Why a call came back. */
enum tmd_code {
    TMD_DONE = 0,
    TMD_ENDING,           /* this side closes the link */
    TMD_SEND_FAILED,      /* `error` says why */
    TMD_HUNG_UP,          /* the peer went away while this side had something to send */
    TMD_NO_ROOM,          /* the peer took nothing until the timeout */
    TMD_STUCK,            /* neither direction moved until the timeout */
    TMD_SILENT,           /* the peer sent nothing until the timeout */
    TMD_RECEIVE_FAILED,   /* `error` says why */
    TMD_CLOSED,           /* the peer closed the connection */
    TMD_OTHER_HEADER,     /* `header` is not the expected one, which was for a payload of `expected_bytes` */
    TMD_NO_MEMORY,
    TMD_UNKNOWN,          /* there is no such reduction */
    TMD_BROKEN_OFF,       /* a frame before was not sent to its end: nothing may follow it */
};

typedef struct {
    int32_t code;
    int32_t error;           /* errno */
    uint64_t link;           /* address of the tmd_link concerned */
    uint32_t expected_bytes;
    _Atomic int32_t stopped; /* the last bytes received were a STOP */
    uint8_t header[TMD_HEADER_BYTES];
} tmd_outcome;

/* What becomes of what is received: combined with what is there (operation, element type), or stored (TMD_STORE). */
enum tmd_operation { TMD_STORE = -1, TMD_SUM, TMD_MIN, TMD_MAX, TMD_PRODUCT, TMD_BAND, TMD_BOR, TMD_BXOR };
enum tmd_type { TMD_F32, TMD_F64, TMD_F16, TMD_BF16, TMD_I8, TMD_U8, TMD_I16, TMD_I32, TMD_I64, TMD_BOOL, TMD_TYPES };

typedef void tmd_combiner(void *into, const void *other, size_t elements);

/* How a payload is combined. `combine` NULL: stored. `divisor` above 1: each result is divided by it afterwards. */
typedef struct {
    tmd_combiner *combine;
    size_t element_bytes;
    int type;
    int divisor;
} tmd_reduction;

/* A frame to send, or the place for one that is expected. */
typedef struct {
    uint8_t *at;
    uint32_t bytes;
    uint8_t combine; /* with what is there; else it is overwritten */
    uint8_t divide;  /* afterwards */
} tmd_frame;

/* What goes to one link, or comes from it, cut into frames. */
typedef struct {
    tmd_link *link;
    uint8_t *at;
    uint64_t bytes;
} tmd_piece;

/* The frames for one link, sent in order. Frame n goes out once n + 1 - lead frames were received in the same call. */
typedef struct {
    tmd_link *link;
    const tmd_frame *frames;
    size_t count, lead;
    size_t done;
    uint8_t header[TMD_HEADER_BYTES];
    int full;  /* the link takes no more for now */
    int begun; /* the frame that the link has begun is one of these */
} tmd_sender;

/* The frames from one link, received in order. */
typedef struct {
    tmd_link *link;
    const tmd_frame *frames;
    size_t count;
    tmd_reduction reduction;
    size_t done;
    size_t filled;   /* bytes of the current frame, its header included */
    size_t combined; /* bytes of its payload that have been combined */
    uint8_t header[TMD_HEADER_BYTES];
    uint8_t last[TMD_HEADER_BYTES]; /* what was received last of its payload */
} tmd_receiver;

/* reduce.c */
size_t tmd_element_bytes(int type);
tmd_combiner *tmd_combiner_of(int type, int operation); /* NULL: not known */
void tmd_divide(int type, void *data, size_t elements, int divisor);

/* frames.c */
int tmd_push(tmd_sender *sender, uint32_t epoch, uint8_t kind, tmd_outcome *outcome);
int tmd_pull(tmd_receiver *receiver, uint32_t epoch, uint8_t kind, int wait, tmd_outcome *outcome);
int tmd_end(tmd_outcome *outcome, int code, const tmd_link *link, int error);

/* transfer.c */
int tmd_take_in(tmd_sender *senders, size_t n, tmd_receiver *receiver, uint32_t epoch, uint8_t kind, tmd_outcome *outcome);
int tmd_transfer(tmd_sender *senders, size_t n, tmd_receiver *receiver, uint32_t epoch, uint8_t kind, tmd_outcome *outcome);

#endif
