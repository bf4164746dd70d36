/* Runs the scanner over inputs from stdin, each in a buffer of exactly its size, so that the sanitizers see any read
 * past it. Input: host flag, where to split, length (three little-endian uint32), then the bytes. */
#include "../chakra_capture/trace/_scan.c"

#include <stdio.h>

static u8 *exact(const u8 *from, i64 len)
{
    u8 *to = malloc(len ? (size_t)len : 1);
    if (len)
        memcpy(to, from, (size_t)len);
    return to;
}

/* As the walker does: after damage on to the next brace, which is enough to reach every state. Returns rows + elements. */
static i64 scan_all(const u8 *data, i64 len, i64 step, int host)
{
    scan *s = cc_new(host, 42);
    i64 at = 0, size = step < len ? step : len, out[2];
    while (at <= len) {
        i64 window = at + size < len ? size : len - at;
        u8 *buf = exact(data + at, window);
        int what = cc_elements(s, buf, window, 0, out);
        if (out[0] < 0 || out[0] > window || out[1] < out[0] - 1 || out[1] > window)
            abort();
        free(buf);
        if (what == NO_MEMORY)
            abort();
        if (what == MORE) {
            if (at + window == len)
                break;
            at += out[0];
            size *= 2;   /* as the window grows for an element that does not fit */
            continue;
        }
        if (what == ODD) {
            at += out[1];
            continue;
        }
        at += out[0];
        if (what != END)
            while (++at < len && data[at] != '{')
                ;
        cc_set_state(s, AFTER_COMMA);
    }
    i64 rows = cc_rows(s), elements = cc_elements_read(s);
    for (i64 i = 0; i * cc_block_rows() < rows; i++)
        if (!cc_block(s, i))
            abort();
    cc_free(s);
    return rows * 1000003 + elements;
}

static void skip_value(const u8 *data, i64 len, int host)
{
    scan *s = cc_new(host, 42);
    u8 *buf = exact(data, len);
    i64 out[2] = {0, 0};
    if (len && cc_value(s, buf, len, 0, out) == END && (out[0] < 1 || out[0] > len))
        abort();
    free(buf);
    cc_free(s);
}

int main(void)
{
    uint32_t head[3];
    long inputs = 0;
    while (fread(head, sizeof head, 1, stdin) == 1) {
        u8 *data = malloc(head[2] ? head[2] : 1);
        if (head[2] && fread(data, head[2], 1, stdin) != 1)
            return 2;
        i64 whole = scan_all(data, head[2], head[2], (int)head[0]);
        i64 pieces = scan_all(data, head[2], head[1] % 200 + 1, (int)head[0]);
        if (whole != pieces) {
            fprintf(stderr, "input %ld: whole and in pieces differ\n", inputs);
            return 3;
        }
        skip_value(data, head[2], (int)head[0]);
        free(data);
        inputs++;
    }
    printf("%ld\n", inputs);
    return 0;
}
