/* See standby_flag.h. */

#include "standby_flag.h"

#include <stddef.h>
#include <string.h>

const char *standby_flag_parse(const char *text, standby_flag *flag)
{
    if (text == NULL || *text < '0' || *text > '9')
        return "expected the number of standby nodes, as in --standby=1";
    standby_flag read = { 0, false };
    for (; *text >= '0' && *text <= '9'; text++) {
        read.count = read.count * 10 + (unsigned)(*text - '0');
        if (read.count > TMD_MAX_STANDBY)
            return "more than 1024 standby nodes";
    }
    if (strcmp(text, ":pool") == 0)
        read.pool = true;
    else if (*text == ':')
        return "unknown option; the only one is \"pool\", as in --standby=1:pool";
    else if (*text != '\0')
        return "expected a number, and \":pool\" after it or nothing";
    *flag = read;
    return NULL;
}
