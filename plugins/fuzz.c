/* Drives what the plugins read and write as text with arbitrary bytes: node_event.h, job_view.h, standby_flag.h.

   With clang: `make fuzz` (libFuzzer, coverage-guided, as long as FUZZ_S says). With any compiler: `make fuzz-check`, the same number of
   pseudo-random inputs each time. Both with the address and undefined-behaviour sanitizers; what is wrong ends in abort(). */

#include "job_view.h"
#include "node_event.h"
#include "standby_flag.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_INPUT_BYTES = 4096 };

#define CHECK(what)                                                        \
    do {                                                                   \
        if (!(what)) {                                                     \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #what); \
            abort();                                                       \
        }                                                                  \
    } while (0)

/* What is still to be read of the input. */
typedef struct {
    const unsigned char *next;
    size_t left;
} source;

static uint32_t take_number(source *input)
{
    uint32_t number = 0;
    for (int i = 0; i < 4 && input->left > 0; i++, input->next++, input->left--)
        number = number << 8 | *input->next;
    return number;
}

/* A string up to a newline or the end of the input; NULL for an empty one at times. */
static char *take_text(source *input)
{
    const unsigned char *end = input->left > 0 ? memchr(input->next, '\n', input->left) : NULL;
    size_t bytes = end != NULL ? (size_t)(end - input->next) : input->left;
    char *text = malloc(bytes + 1);
    CHECK(text != NULL);
    if (bytes > 0)
        memcpy(text, input->next, bytes);
    text[bytes] = '\0';
    size_t used = bytes + (end != NULL);
    input->next += used;
    input->left -= used;
    return text;
}

/* By its value, unlike node_event.c, which goes by the ranges of its bytes. Returns its length, 0 if it is no UTF-8. */
static size_t decode(const unsigned char *text, size_t left)
{
    static const uint32_t LEAST[] = { 0, 0, 0x80, 0x800, 0x10000 };
    size_t bytes = text[0] < 0x80 ? 1 : text[0] >> 5 == 6 ? 2 : text[0] >> 4 == 14 ? 3 : text[0] >> 3 == 30 ? 4 : 0;
    if (bytes < 2)
        return bytes;
    if (bytes > left)
        return 0;
    uint32_t point = text[0] & (0xFFu >> (bytes + 1));
    for (size_t i = 1; i < bytes; i++) {
        if (text[i] >> 6 != 2)
            return 0;
        point = point << 6 | (text[i] & 0x3F);
    }
    return point >= LEAST[bytes] && point <= 0x10FFFF && (point < 0xD800 || point > 0xDFFF) ? bytes : 0;
}

/* An object whose strings are closed, with escapes that exist and neither control characters nor anything but UTF-8. */
static void check_json(const char *text, size_t bytes)
{
    bool quoted = false;
    int depth = 0;
    CHECK(bytes < TMD_EVENT_MAX_BYTES && strlen(text) == bytes && text[0] == '{');
    for (size_t i = 0; i < bytes;) {
        const unsigned char *at = (const unsigned char *)text + i;
        size_t step = decode(at, bytes - i);
        CHECK(step > 0 && *at >= 0x20 && *at != 0x7F);
        if (quoted && *at == '\\') {
            CHECK(strchr("\"\\u", at[1]) != NULL && at[1] != '\0');
            step = at[1] == 'u' ? 6 : 2;
            CHECK(i + step <= bytes);
            for (size_t j = 2; j < step; j++)
                CHECK(strchr("0123456789abcdef", at[j]) != NULL);
        } else if (*at == '"')
            quoted = !quoted;
        else if (!quoted) {
            depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
            CHECK(step == 1 && (depth > 0 || i + 1 == bytes));
        }
        i += step;
    }
    CHECK(!quoted && depth == 0);
}

static void drive_events(source input)
{
    char text[TMD_EVENT_MAX_BYTES];
    struct timespec at = { (time_t)take_number(&input), (long)(take_number(&input) % 1000000000) };
    uint32_t states[2] = { take_number(&input), take_number(&input) };
    char *name = take_text(&input), *reason = take_text(&input), *other = take_text(&input);
    node_view before = { name, states[0], reason }, after = { *name ? name : NULL, states[1], *other ? other : NULL };
    CHECK(!node_event_matters(&before, &before));
    CHECK(node_event_matters(&before, &after) == node_event_matters(&after, &before));
    check_json(text, node_event_format(text, &before, at));
    check_json(text, node_event_format(text, &after, at));
    check_json(text, node_event_format_resync(text, (uint64_t)states[0] << 32 | states[1], at));
    free(name), free(reason), free(other);
}

static void drive_views(source input)
{
    uint32_t nodes = take_number(&input) % 5000 + 1, tasks = take_number(&input) % 100000;
    char *counts = take_text(&input), *noted = take_text(&input);
    size_t size = take_number(&input) % 256;
    char *out = malloc(size + 1); /* exactly as large as is said: the sanitizer sees a byte too many */
    CHECK(out != NULL);
    if (job_view_cut(counts, nodes, out, size)) {
        uint32_t total = job_view_total(counts); /* 0 as well if what was cut off is no list */
        CHECK(strlen(out) < size && (total == 0 || job_view_total(out) <= total));
        char *again = malloc(size + 1);
        CHECK(again != NULL && job_view_cut(out, nodes, again, size) && strcmp(out, again) == 0);
        free(again);
    }
    if (job_view_spread(counts, nodes, tasks, out, size))
        CHECK(strlen(out) < size && job_view_total(out) == tasks);
    uint32_t own = job_view_nodes(noted, nodes, tasks % 8);
    CHECK(own <= nodes);
    free(out), free(counts), free(noted);
}

static void drive_flag(source input)
{
    char *text = take_text(&input);
    standby_flag flag = { 0, false };
    const char *wrong = standby_flag_parse(text, &flag);
    CHECK(wrong == NULL ? flag.count <= TMD_MAX_STANDBY : *wrong != '\0' && flag.count == 0);
    free(text);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t bytes);

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t bytes)
{
    source input = { data, bytes < MOST_INPUT_BYTES ? bytes : MOST_INPUT_BYTES };
    drive_events(input);
    drive_views(input);
    drive_flag(input);
    return 0;
}

#ifdef WITHOUT_LIBFUZZER
/* What makes a difference to the code, so that chance comes upon it. */
static const char *const WORDS[] = { "\"", "\\", "\n", "\xC3\xA9", "\xE2\x98\x83", "\xF0\x9F\x94\xA5", "\xED\xA0\x80", "\xC0\x80", "\xF4\x90\x80\x80",
    "2(x3)", ",1", "1(x", "(x0)", "4294967295", "4294967296", "1-2", ":pool", "IDLE", "\x01", "\x7F" };

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

int main(int argc, char **argv)
{
    long rounds = argc > 1 ? strtol(argv[1], NULL, 10) : 0;
    uint64_t random = 0x746D64;
    for (long i = 0; i < rounds; i++) {
        unsigned char data[MOST_INPUT_BYTES + 8];
        size_t bytes = 0, wanted = next_random(&random) % (i % 16 == 0 ? MOST_INPUT_BYTES : 200);
        while (bytes < wanted) {
            const char *word = WORDS[next_random(&random) % (sizeof WORDS / sizeof WORDS[0])];
            if (next_random(&random) % 3 != 0)
                data[bytes++] = (unsigned char)next_random(&random);
            else
                for (; *word != '\0' && bytes < MOST_INPUT_BYTES; word++)
                    data[bytes++] = (unsigned char)*word;
        }
        LLVMFuzzerTestOneInput(data, bytes);
    }
    printf("%ld inputs, nothing wrong\n", rounds);
    return rounds > 0 ? 0 : 2;
}
#endif
