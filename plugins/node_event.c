/* See node_event.h. */

#include "node_event.h"

#include <inttypes.h>
#include <slurm/slurm.h>
#include <stdio.h>
#include <string.h>

static const struct {
    uint32_t flag;
    const char *name; /* as in the State of `scontrol show node` */
} FLAGS[] = {
    { NODE_STATE_DRAIN, "DRAIN" },
    { NODE_STATE_FAIL, "FAIL" },
    { NODE_STATE_NO_RESPOND, "NOT_RESPONDING" },
    { NODE_STATE_COMPLETING, "COMPLETING" },
    { NODE_STATE_MAINT, "MAINTENANCE" },
    { NODE_STATE_REBOOT_REQUESTED, "REBOOT_REQUESTED" },
    { NODE_STATE_REBOOT_ISSUED, "REBOOT_ISSUED" },
    { NODE_STATE_POWER_DOWN, "POWER_DOWN" },
    { NODE_STATE_POWERING_DOWN, "POWERING_DOWN" },
    { NODE_STATE_POWERED_DOWN, "POWERED_DOWN" },
    { NODE_STATE_INVALID_REG, "INVALID_REG" },
};
enum { FLAG_COUNT = sizeof FLAGS / sizeof FLAGS[0] };

/* Each job's end sets COMPLETING, so by itself it says nothing. */
static const uint32_t TROUBLE = NODE_STATE_DRAIN | NODE_STATE_FAIL | NODE_STATE_NO_RESPOND | NODE_STATE_MAINT | NODE_STATE_REBOOT_REQUESTED
    | NODE_STATE_REBOOT_ISSUED | NODE_STATE_POWER_DOWN | NODE_STATE_POWERING_DOWN | NODE_STATE_POWERED_DOWN | NODE_STATE_INVALID_REG;

static const char *base_name(uint32_t state)
{
    switch (state & NODE_STATE_BASE) {
    case NODE_STATE_DOWN:
        return "DOWN";
    case NODE_STATE_IDLE:
        return "IDLE";
    case NODE_STATE_ALLOCATED:
        return "ALLOCATED";
    case NODE_STATE_MIXED:
        return "MIXED";
    case NODE_STATE_ERROR:
        return "ERROR";
    case NODE_STATE_FUTURE:
        return "FUTURE";
    default:
        return "UNKNOWN";
    }
}

static bool at_work(uint32_t state)
{
    uint32_t base = state & NODE_STATE_BASE;
    return base == NODE_STATE_IDLE || base == NODE_STATE_ALLOCATED || base == NODE_STATE_MIXED;
}

static bool troubled(uint32_t state)
{
    return (state & TROUBLE) != 0 || !at_work(state);
}

static bool same_text(const char *one, const char *other)
{
    return strcmp(one ? one : "", other ? other : "") == 0;
}

bool node_event_matters(const node_view *before, const node_view *after)
{
    if (!troubled(before->state) && !troubled(after->state))
        return false;
    uint32_t watched = NODE_STATE_BASE | TROUBLE | NODE_STATE_COMPLETING;
    return ((before->state ^ after->state) & watched) != 0 || !same_text(before->reason, after->reason);
}

/* Bytes of the UTF-8 sequence at `text`, 0 if there is none: overlong forms, surrogates and what is beyond U+10FFFF are none. */
static size_t sequence_bytes(const unsigned char *text)
{
    unsigned char first = text[0];
    unsigned char low = 0x80, high = 0xBF; /* of the second byte */
    size_t bytes;
    if (first < 0x80)
        return 1;
    if (first >= 0xC2 && first <= 0xDF)
        bytes = 2;
    else if (first >= 0xE0 && first <= 0xEF)
        bytes = 3;
    else if (first >= 0xF0 && first <= 0xF4)
        bytes = 4;
    else
        return 0;
    if (first == 0xE0)
        low = 0xA0;
    else if (first == 0xED)
        high = 0x9F;
    else if (first == 0xF0)
        low = 0x90;
    else if (first == 0xF4)
        high = 0x8F;
    if (text[1] < low || text[1] > high)
        return 0;
    for (size_t i = 2; i < bytes; i++)
        if ((text[i] & 0xC0) != 0x80) /* also the final zero */
            return 0;
    return bytes;
}

/* One character of a JSON string into `piece`; returns how many bytes of `text` it was. */
static size_t escape(const unsigned char *text, char piece[8])
{
    size_t bytes = sequence_bytes(text);
    if (bytes == 0) {
        snprintf(piece, 8, "\\ufffd");
        return 1;
    }
    if (text[0] == '"' || text[0] == '\\')
        snprintf(piece, 8, "\\%c", text[0]);
    else if (text[0] < 0x20 || text[0] == 0x7F)
        snprintf(piece, 8, "\\u%04x", text[0]);
    else {
        memcpy(piece, text, bytes);
        piece[bytes] = '\0';
    }
    return bytes;
}

/* `text` as the inside of a JSON string: at most `size` - 1 bytes as they are written, whole characters only, and a final zero. */
static void quote(char *out, size_t size, const char *text)
{
    const unsigned char *next = (const unsigned char *)(text ? text : "");
    size_t used = 0;
    char piece[8];
    while (*next != '\0') {
        size_t taken = escape(next, piece);
        size_t bytes = strlen(piece);
        if (used + bytes >= size)
            break;
        memcpy(out + used, piece, bytes);
        used += bytes;
        next += taken;
    }
    out[used] = '\0';
}

static void list_flags(char *out, size_t size, uint32_t state)
{
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < FLAG_COUNT; i++)
        if (state & FLAGS[i].flag)
            used += (size_t)snprintf(out + used, size - used, "%s\"%s\"", used ? "," : "", FLAGS[i].name);
}

size_t node_event_format(char out[TMD_EVENT_MAX_BYTES], const node_view *node, struct timespec at)
{
    char name[TMD_EVENT_NODE_BYTES], reason[TMD_EVENT_REASON_BYTES], flags[FLAG_COUNT * 20];
    quote(name, sizeof name, node->name);
    quote(reason, sizeof reason, node->reason);
    list_flags(flags, sizeof flags, node->state);
    int wrote = snprintf(out, TMD_EVENT_MAX_BYTES,
        "{\"event\":\"node\",\"time\":%lld.%06ld,\"node\":\"%s\",\"state\":\"%s\",\"flags\":[%s],\"reason\":\"%s\"}",
        (long long)at.tv_sec, at.tv_nsec / 1000, name, base_name(node->state), flags, reason);
    return (size_t)wrote;
}

size_t node_event_format_resync(char out[TMD_EVENT_MAX_BYTES], uint64_t lost, struct timespec at)
{
    int wrote = snprintf(out, TMD_EVENT_MAX_BYTES, "{\"event\":\"resync\",\"time\":%lld.%06ld,\"lost\":%" PRIu64 "}", (long long)at.tv_sec,
        at.tv_nsec / 1000, lost);
    return (size_t)wrote;
}
