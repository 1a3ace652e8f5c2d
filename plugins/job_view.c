/* See job_view.h. */

#include "job_view.h"

#include <inttypes.h>
#include <stdio.h>

/* A run of equal counts. */
typedef struct {
    uint32_t count, nodes;
} run;

static bool read_number(const char **text, uint32_t *number)
{
    if (**text < '0' || **text > '9')
        return false;
    uint64_t value = 0;
    for (; **text >= '0' && **text <= '9'; (*text)++) {
        value = value * 10 + (uint64_t)(**text - '0');
        if (value > UINT32_MAX)
            return false;
    }
    *number = (uint32_t)value;
    return true;
}

/* "COUNT" or "COUNT(xNODES)", then a comma or the end. */
static bool read_run(const char **text, run *next)
{
    next->nodes = 1;
    if (!read_number(text, &next->count))
        return false;
    if ((*text)[0] == '(' && (*text)[1] == 'x') {
        *text += 2;
        if (!read_number(text, &next->nodes) || next->nodes == 0 || **text != ')')
            return false;
        (*text)++;
    }
    if (**text == ',')
        return *++*text != '\0';
    return **text == '\0';
}

/* A list that is being written; the last run is held back, in case that the next one is equal to it. */
typedef struct {
    char *out;
    size_t size, used;
    run last;
} writer;

static bool flush(writer *list)
{
    if (list->last.nodes == 0)
        return true;
    const char *comma = list->used > 0 ? "," : "";
    size_t room = list->size - list->used;
    int wrote = list->last.nodes == 1
        ? snprintf(list->out + list->used, room, "%s%" PRIu32, comma, list->last.count)
        : snprintf(list->out + list->used, room, "%s%" PRIu32 "(x%" PRIu32 ")", comma, list->last.count, list->last.nodes);
    if (wrote < 0 || (size_t)wrote >= room)
        return false;
    list->used += (size_t)wrote;
    return true;
}

static bool append(writer *list, uint32_t count, uint32_t nodes)
{
    if (nodes == 0)
        return true;
    if (list->last.nodes > 0 && list->last.count == count) {
        list->last.nodes += nodes;
        return true;
    }
    if (!flush(list))
        return false;
    list->last = (run){ count, nodes };
    return true;
}

uint32_t job_view_nodes(const char *noted, uint32_t allocated, uint32_t standby)
{
    uint32_t left = allocated > standby ? allocated - standby : 0;
    uint32_t least = 0, most = 0;
    if (noted == NULL || !read_number(&noted, &least) || least == 0)
        return left;
    most = least;
    if (*noted == '-') {
        noted++;
        if (!read_number(&noted, &most) || most < least)
            return left;
    }
    if (*noted != '\0' || least > allocated)
        return left;
    return left < least ? least : left > most ? most : left;
}

bool job_view_cut(const char *counts, uint32_t nodes, char *out, size_t size)
{
    writer list = { out, size, 0, { 0, 0 } };
    run next;
    while (nodes > 0) {
        if (*counts == '\0' || !read_run(&counts, &next))
            return false;
        uint32_t taken = next.nodes < nodes ? next.nodes : nodes;
        if (!append(&list, next.count, taken))
            return false;
        nodes -= taken;
    }
    return list.last.nodes > 0 && flush(&list);
}

uint32_t job_view_total(const char *counts)
{
    uint64_t total = 0;
    run next;
    while (*counts != '\0') {
        if (!read_run(&counts, &next))
            return 0;
        total += (uint64_t)next.count * next.nodes;
        if (total > UINT32_MAX)
            return 0;
    }
    return (uint32_t)total;
}

bool job_view_spread(const char *counts, uint32_t nodes, uint32_t tasks, char *out, size_t size)
{
    if (tasks < nodes)
        return false;
    writer list = { out, size, 0, { 0, 0 } };
    run next;
    uint32_t spare = tasks - nodes; /* beyond the one for each node */
    while (nodes > 0) {
        if (*counts == '\0' || !read_run(&counts, &next))
            return false;
        uint32_t room = next.count > 0 ? next.count - 1 : 0;
        for (uint32_t i = 0; i < next.nodes && nodes > 0; i++, nodes--) {
            uint32_t more = room < spare && nodes > 1 ? room : spare;
            if (!append(&list, 1 + more, 1))
                return false;
            spare -= more;
        }
    }
    return list.last.nodes > 0 && flush(&list);
}
