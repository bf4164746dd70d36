/* One text per row, joined from pieces, handed over as an Arrow array; see join.py, which does the same with polars.
 *
 * Arrow C data interface (https://arrow.apache.org/docs/format/CDataInterface.html), format "U": UTF-8, 64-bit offsets.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct ArrowSchema {
    const char *format, *name, *metadata;
    int64_t flags, n_children;
    struct ArrowSchema **children, *dictionary;
    void (*release)(struct ArrowSchema *);
    void *private_data;
};

struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

/* A text out of a dictionary (code -1: nothing), or, where numbers is set, a text of its own and an integer after it
 * (INT64_MIN: nothing). */
typedef struct {
    const int32_t *codes;
    const uint8_t *text;
    const int64_t *ends;
    const int64_t *numbers;
} piece;

#define LONGEST_NUMBER 20

static int64_t text_of(const piece *p, int64_t row, const uint8_t **text)
{
    if (p->numbers) {
        *text = p->text;
        return p->numbers[row] == INT64_MIN ? 0 : p->ends[0];
    }
    int32_t code = p->codes[row];
    if (code < 0)
        return 0;
    int64_t begin = code ? p->ends[code - 1] : 0;
    *text = p->text + begin;
    return p->ends[code] - begin;
}

static uint8_t *write_number(uint8_t *to, int64_t number)
{
    uint8_t digits[LONGEST_NUMBER];
    uint64_t left = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    int n = 0;

    if (number < 0)
        *to++ = '-';
    do
        digits[n++] = (uint8_t)('0' + left % 10);
    while (left /= 10);
    while (n)
        *to++ = digits[--n];
    return to;
}

static void release_array(struct ArrowArray *array)
{
    for (int i = 0; i < 3; i++)
        free((void *)array->buffers[i]);
    free(array->buffers);
    array->release = NULL;
}

static void release_schema(struct ArrowSchema *schema) { schema->release = NULL; }

void cc_schema(struct ArrowSchema *schema)
{
    memset(schema, 0, sizeof *schema);
    schema->format = "U";
    schema->name = "";
    schema->release = release_schema;
}

/* Changes with the arguments of these functions, see compiled.py. */
int cc_interface(void) { return 1; }

/* Fills array, whose memory is the caller's. Returns 0, or -1 when memory is short. */
int cc_join(int64_t rows, int pieces, const piece *p, struct ArrowArray *array)
{
    const uint8_t *text = NULL;
    int64_t size = 0;

    memset(array, 0, sizeof *array);
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < pieces; i++)
            size += text_of(&p[i], row, &text) + (p[i].numbers ? LONGEST_NUMBER : 0);
    const void **buffers = calloc(3, sizeof *buffers);
    int64_t *offsets = malloc((size_t)(rows + 1) * sizeof *offsets);
    uint8_t *values = malloc((size_t)size + 1);
    if (!buffers || !offsets || !values) {
        free(buffers);
        free(offsets);
        free(values);
        return -1;
    }
    uint8_t *to = values;
    for (int64_t row = 0; row < rows; row++) {
        offsets[row] = to - values;
        for (int i = 0; i < pieces; i++) {
            int64_t len = text_of(&p[i], row, &text);
            if (!len)
                continue;
            memcpy(to, text, (size_t)len);
            to += len;
            if (p[i].numbers)
                to = write_number(to, p[i].numbers[row]);
        }
    }
    offsets[rows] = to - values;
    buffers[1] = offsets;
    buffers[2] = values;
    array->length = rows;
    array->n_buffers = 3;
    array->buffers = buffers;
    array->release = release_array;
    return 0;
}
