/* Scanner for device and host traces: JSON text in, columns out.
 *
 * Called through ctypes (which releases the GIL), so there is no Python.h here and nothing is shared between two scans.
 * The caller feeds one array of JSON objects ("traceEvents" or "nodes") piece by piece from a buffer that it recycles.
 * Every element is checked as strict JSON. The plain ones become a row; of the others the place is handed back, and the
 * caller's slow reader decides: ODD elements are valid but unusual (an escaped key, a quoted number, a key twice),
 * DAMAGED ones are no JSON. So an unusual value has one meaning, in one place, whichever way a file is read.
 *
 * An element that is not whole yet is scanned again once more of it is there: the caller doubles the buffer, so the
 * work stays linear. Nothing recurses; the kind of each open container is one bit.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define LITTLE_ENDIAN_WORDS
#endif

typedef uint8_t u8;
typedef int32_t i32;
typedef int64_t i64;
typedef uint64_t u64;

enum status { MORE, END, ODD, DAMAGED, DEEP, NO_MEMORY };
enum state { AT_FIRST, AFTER_COMMA, AFTER_ELEMENT };

#define MISSING INT64_MIN
#define MAX_DEPTH 1000   /* deeper is DEEP: no trace nests like this */
#define ODD_DEPTH 100    /* deeper is ODD: the slow reader recurses, so it must have its say */
#define MAX_RESIDUE 64   /* keys of an element that have no column; more make it ODD, which bounds the search for twins */
#define MAX_ROWS INT32_MAX
/* Columns grow by blocks, which never move and are freed one by one when taken over. No power of two: the columns of a row
 * would all fall into one set of the cache. */
#define BLOCK_ROWS 33000
#define MAX_CODES 6
#define MAX_WIDE 16

typedef struct {
    const u8 *at;
    i64 len;   /* -1: absent */
} span;

typedef struct {
    span key, value;
} member;

/* Texts in order of first sight; `slot` is an open-addressed table of entry numbers + 1. */
typedef struct {
    u8 *text;
    i64 used, room;
    i64 *end;     /* where each entry ends in text */
    u64 *hash;
    i64 *count;
    i64 n, cap;
    i32 *slot;
    u64 mask;
} dict;

typedef struct {
    i64 *row, *value;
    i64 n, cap;
} sparse;

/* What stood before a member's value when it was last read: `, "key": ` with the blanks of this file's writer. Where the
 * same bytes stand again they need not be looked at one by one: they were found to be whole JSON in this very spot. */
#define GUESS_WORDS 4
#define GUESS_BYTES (GUESS_WORDS * 8)
#define GUESSES 4
#define MAX_KEY 40
#define MAX_PLACES 192
#define PLACE_SLOTS 512

typedef struct place place;

typedef struct {
    u64 text[GUESS_WORDS], mask[GUESS_WORDS];
    place *to;
    i32 len;     /* 0: not used yet */
    i32 key_at, key_len, action;
} guess;

/* One key in one kind of object, and what was seen to follow its value. */
struct place {
    u8 key[MAX_KEY];
    i32 key_len, level, action, turn;
    guess next[GUESSES];
};

/* The same for an attribute of a node, up to its value: `, {"name": "rf_id", "type": "uint64", "value": `. */
#define ATTR_BYTES 96
#define MAX_ATTRS 24
typedef struct {
    u8 text[ATTR_BYTES];
    i32 len, name_at, name_len, to;
} attr_guess;

typedef struct scan {
    int host;
    int state;
    int why;               /* set where a scanning function returns NULL */
    const u8 *stop;        /* and where that was */
    int escaped;           /* a string just read holds a backslash */
    int deep;
    int odd;
    int around;            /* containers of the element that are open around the value being read */
    u64 seed;
    i64 rows;
    i64 elements;          /* objects taken as whole and plain, rows or not */
    u8 **block;            /* each: BLOCK_ROWS of every integer column, then of every code column */
    i64 blocks, blocks_cap;
    i64 *ints;             /* of the last block */
    i32 *codes;
    dict dicts[MAX_CODES];
    sparse wide[MAX_WIDE];
    u8 *scratch;
    i64 scratch_len, scratch_room;
    u8 stack[MAX_DEPTH / 8 + 2];
    int num_places;
    place places[MAX_PLACES];
    u8 place_slot[PLACE_SLOTS];
    attr_guess attrs[MAX_ATTRS];
} scan;

/* --- columns of a device trace ------------------------------------------------------------------------------------ */

enum { D_PID, D_TID, D_TS, D_DUR, D_EXTERNAL, D_RECORD, D_CORRELATION, D_SEQUENCE, D_DEVICE, D_STREAM, D_INTS };
enum { D_PHASE, D_CATEGORY, D_NAME, D_SHAPES, D_TYPES, D_ARGS, D_CODES };
/* Integer args that differ from row to row: kept apart, or every row would have args text of its own. */
enum {
    W_EV_IDX, W_EVENT_INDEX, W_PYTHON_ID, W_PYTHON_PARENT, W_PYTHON_MODULE, W_ADDR, W_BYTES, W_ALLOCATED, W_RESERVED,
    W_COPY_BYTES, W_WAIT_RECORD, W_WAIT_EVENT, N_WIDE
};
/* What an arg is promoted to: an id column, a text column, or (from P_WIDE on) a sparse column. */
enum { P_SHAPES = 6, P_TYPES = 7, P_WIDE = 8, P_NONE = 63 };

/* --- columns of a host trace -------------------------------------------------------------------------------------- */

enum { H_ID, H_CTRL_DEPS, H_PARENT, H_RF_ID, H_SEQ_ID, H_SCOPE, H_TID, H_FW_TID, H_FW_PARENT, H_INTS };
enum { H_NAME, H_IN_SHAPES, H_IN_TYPES, H_IN_VALUES, H_OUT_VALUES, H_DETAILS, H_CODES };

/* --- memory -------------------------------------------------------------------------------------------------------- */

static int grow(void *pointer, i64 *cap, i64 need, size_t item)
{
    void **p = pointer;
    i64 size = *cap ? *cap : 64;
    while (size < need)
        size += size / 2;
    void *bigger = realloc(*p, (size_t)size * item);
    if (!bigger)
        return 0;
    *p = bigger;
    *cap = size;
    return 1;
}

static int num_ints(const scan *s) { return s->host ? H_INTS : D_INTS; }
static int num_codes(const scan *s) { return s->host ? H_CODES : D_CODES; }

/* Makes room for one more row; returns its number within the block, -1 where memory is out. */
static i64 new_row(scan *s)
{
    i64 at = s->rows % BLOCK_ROWS;
    if (at || s->rows < s->blocks * BLOCK_ROWS)
        return at;
    if (s->rows >= MAX_ROWS)
        return -1;
    if (s->blocks == s->blocks_cap && !grow(&s->block, &s->blocks_cap, s->blocks + 1, sizeof(u8 *)))
        return -1;
    size_t ints = (size_t)num_ints(s) * sizeof(i64), codes = (size_t)num_codes(s) * sizeof(i32);
    u8 *fresh = malloc(BLOCK_ROWS * (ints + codes));
    if (!fresh)
        return -1;
    s->block[s->blocks++] = fresh;
    s->ints = (i64 *)fresh;
    s->codes = (i32 *)(fresh + BLOCK_ROWS * ints);
    return at;
}

/* --- dictionaries -------------------------------------------------------------------------------------------------- */

static inline u64 load8(const u8 *p)
{
    u64 v;
    memcpy(&v, p, 8);
    return v;
}

static inline u64 mix(u64 a, u64 b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (u64)product ^ (u64)(product >> 64);
}

/* Seeded, so that no file can be made whose texts all fall into one slot. */
static inline u64 hash_of(const u8 *p, i64 len, u64 seed)
{
    u64 h = seed ^ ((u64)len * 0x9E3779B97F4A7C15u);
    for (; len >= 16; p += 16, len -= 16)
        h = mix(load8(p) ^ 0xA0761D6478BD642Fu ^ seed, load8(p + 8) ^ h);
    if (len >= 8) {
        h = mix(load8(p) ^ 0xE7037ED1A0B428DBu ^ seed, h ^ 0x8EBC6AF09C88C6E3u);
        p += 8;
        len -= 8;
    }
    u64 tail = 0;
    for (int shift = 0; len; len--, shift += 8)
        tail |= (u64)*p++ << shift;
    return mix(tail ^ 0x589965CC75374CC3u ^ seed, h ^ 0x1D8E4E27C47D124Fu);
}

static int rehash(dict *d)
{
    u64 size = d->mask ? (d->mask + 1) * 2 : 256;
    i32 *slot = calloc(size, sizeof(i32));
    if (!slot)
        return 0;
    for (i64 i = 0; i < d->n; i++) {
        u64 at = d->hash[i] & (size - 1);
        while (slot[at])
            at = (at + 1) & (size - 1);
        slot[at] = (i32)i + 1;
    }
    free(d->slot);
    d->slot = slot;
    d->mask = size - 1;
    return 1;
}

static int add_entry(dict *d, const u8 *p, i64 len, u64 hash)
{
    if (d->n >= INT32_MAX - 1)
        return 0;
    if (d->n == d->cap) {
        i64 cap = d->cap, same = d->cap, too = d->cap;
        if (!grow(&d->end, &cap, d->n + 1, sizeof(i64)) || !grow(&d->hash, &same, d->n + 1, sizeof(u64)) ||
            !grow(&d->count, &too, d->n + 1, sizeof(i64)))
            return 0;
        d->cap = cap;
    }
    if (d->used + len > d->room && !grow(&d->text, &d->room, d->used + len, 1))
        return 0;
    if (len)
        memcpy(d->text + d->used, p, (size_t)len);
    d->used += len;
    d->end[d->n] = d->used;
    d->hash[d->n] = hash;
    d->count[d->n] = 0;
    d->n++;
    return 1;
}

/* Code of a text, -1 where memory is out. */
static i32 code_of(scan *s, dict *d, const u8 *p, i64 len)
{
    if ((u64)d->n * 2 >= d->mask && !rehash(d))
        return -1;
    u64 hash = hash_of(p, len, s->seed), at = hash & d->mask;
    for (; d->slot[at]; at = (at + 1) & d->mask) {
        i32 code = d->slot[at] - 1;
        if (d->hash[code] != hash)
            continue;
        i64 begin = code ? d->end[code - 1] : 0;
        if (d->end[code] - begin == len && (!len || !memcmp(d->text + begin, p, (size_t)len)))
            return code;
    }
    if (!add_entry(d, p, len, hash))
        return -1;
    d->slot[at] = (i32)d->n;
    return (i32)d->n - 1;
}

/* --- strict JSON --------------------------------------------------------------------------------------------------- */

#define FAIL(reason) return (s->why = (reason), s->stop = p, NULL)
#define NEED() do { if (p == end) FAIL(MORE); } while (0)

static inline const u8 *space(const u8 *p, const u8 *end)
{
    if (end - p > 1 && *p == ' ')   /* most often one blank or none */
        p++;
    if (p < end && *p > ' ')
        return p;
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r'))
        p++;
    return p;
}

static inline int is_digit(u8 c) { return c >= '0' && c <= '9'; }
static inline int is_delimiter(u8 c) { return c == ',' || c == '}' || c == ']' || c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

static int hex4(const u8 *p)
{
    int value = 0;
    for (int i = 0; i < 4; i++) {
        u8 c = p[i];
        int digit = is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* p at the backslash. Half of a surrogate pair is no character, so it counts as damage. */
static const u8 *escape(scan *s, const u8 *p, const u8 *end)
{
    if (end - p < 2)
        FAIL(MORE);
    u8 c = p[1];
    if (c != 'u') {
        if (c == '"' || c == '\\' || c == '/' || c == 'b' || c == 'f' || c == 'n' || c == 'r' || c == 't')
            return p + 2;
        FAIL(DAMAGED);
    }
    if (end - p < 6)
        FAIL(MORE);
    int unit = hex4(p + 2);
    if (unit < 0 || (unit >= 0xDC00 && unit <= 0xDFFF))
        FAIL(DAMAGED);
    if (unit < 0xD800 || unit > 0xDBFF)
        return p + 6;
    if (end - p < 12)
        FAIL(MORE);
    if (p[6] != '\\' || p[7] != 'u')
        FAIL(DAMAGED);
    unit = hex4(p + 8);
    if (unit < 0xDC00 || unit > 0xDFFF)
        FAIL(DAMAGED);
    return p + 12;
}

/* p at a byte >= 0x80: one character of strict UTF-8 (no overlong form, no surrogate, up to U+10FFFF). */
static const u8 *utf8(scan *s, const u8 *p, const u8 *end)
{
    u8 c = *p, low = 0x80, high = 0xBF;
    int more;
    if (c >= 0xC2 && c <= 0xDF) {
        more = 1;
    } else if (c >= 0xE0 && c <= 0xEF) {
        more = 2;
        if (c == 0xE0)
            low = 0xA0;
        if (c == 0xED)
            high = 0x9F;
    } else if (c >= 0xF0 && c <= 0xF4) {
        more = 3;
        if (c == 0xF0)
            low = 0x90;
        if (c == 0xF4)
            high = 0x8F;
    } else {
        FAIL(DAMAGED);
    }
    if (end - p <= more)
        FAIL(MORE);
    for (p++; more--; p++) {
        if (*p < low || *p > high)
            FAIL(DAMAGED);
        low = 0x80;
        high = 0xBF;
    }
    return p;
}

/* p after the opening quote; returns what follows the closing one. */
static const u8 *string(scan *s, const u8 *p, const u8 *end)
{
    for (;;) {
#if defined(__SSE2__)
        while (end - p >= 16) {
            __m128i v = _mm_loadu_si128((const __m128i *)p);
            /* As signed bytes, all from 0x80 on are below the blank too. */
            __m128i stop = _mm_or_si128(_mm_cmplt_epi8(v, _mm_set1_epi8(0x20)),
                _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('"')), _mm_cmpeq_epi8(v, _mm_set1_epi8('\\'))));
            int mask = _mm_movemask_epi8(stop);
            if (mask) {
                p += __builtin_ctz((unsigned)mask);
                break;
            }
            p += 16;
        }
#elif defined(LITTLE_ENDIAN_WORDS)
        const u64 ones = 0x0101010101010101u, tops = 0x8080808080808080u;
        while (end - p >= 8) {
            u64 v = load8(p), quote = v ^ (ones * '"'), slash = v ^ (ones * '\\');
            u64 stop = (((v - ones * 0x20) | (quote - ones) | (slash - ones)) & ~v & tops) | (v & tops);
            if (stop) {
                p += __builtin_ctzll(stop) >> 3;
                break;
            }
            p += 8;
        }
#endif
        while (p < end && *p >= 0x20 && *p < 0x80 && *p != '"' && *p != '\\')
            p++;
        NEED();
        if (*p == '"')
            return p + 1;
        if (*p == '\\') {
            s->escaped = 1;
            p = escape(s, p, end);
        } else if (*p >= 0x80) {
            p = utf8(s, p, end);
        } else {
            FAIL(DAMAGED);
        }
        if (!p)
            return NULL;
    }
}

static const u8 *digits(const u8 *p, const u8 *end)
{
    while (p < end && is_digit(*p))
        p++;
    return p;
}

/* A number must be followed by something: at the end of the buffer it may go on. */
static const u8 *number(scan *s, const u8 *p, const u8 *end)
{
    const u8 *from;
    if (*p == '-')
        p++;
    NEED();
    if (!is_digit(*p))
        FAIL(DAMAGED);
    p = *p == '0' ? p + 1 : digits(p, end);
    if (p < end && *p == '.') {
        from = ++p;
        p = digits(p, end);
        NEED();
        if (p == from)
            FAIL(DAMAGED);
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        NEED();
        if (*p == '+' || *p == '-')
            p++;
        from = p;
        p = digits(p, end);
        NEED();
        if (p == from)
            FAIL(DAMAGED);
    }
    NEED();
    if (!is_delimiter(*p))
        FAIL(DAMAGED);
    return p;
}

static const u8 *word(scan *s, const u8 *p, const u8 *end, const char *text)
{
    for (; *text; text++, p++) {
        NEED();
        if (*p != (u8)*text)
            FAIL(DAMAGED);
    }
    return p;
}

/* Skips one value of any kind; p at its first byte. Returns what follows it. */
static const u8 *value(scan *s, const u8 *p, const u8 *end)
{
    int level = 0;
    for (;;) {
        NEED();
        switch (*p) {
        case '"':
            p = string(s, p + 1, end);
            break;
        case 't':
            p = word(s, p, end, "true");
            break;
        case 'f':
            p = word(s, p, end, "false");
            break;
        case 'n':
            p = word(s, p, end, "null");
            break;
        case '{':
        case '[': {
            int object = *p == '{';
            if (++level + s->around > MAX_DEPTH)
                FAIL(DEEP);
            if (level >= ODD_DEPTH)
                s->deep = 1;
            if (object)
                s->stack[level >> 3] |= (u8)(1 << (level & 7));
            else
                s->stack[level >> 3] &= (u8)~(1 << (level & 7));
            p = space(p + 1, end);
            NEED();
            if (*p == (object ? '}' : ']')) {
                p++;
                level--;
                break;
            }
            if (object)
                goto key;
            continue;
        }
        default:
            p = number(s, p, end);
        }
        if (!p)
            return NULL;
        for (;;) {   /* a value has ended */
            if (!level)
                return p;
            int object = s->stack[level >> 3] >> (level & 7) & 1;
            p = space(p, end);
            NEED();
            if (*p == ',') {
                p = space(p + 1, end);
                NEED();
                if (object)
                    goto key;
                break;
            }
            if (*p != (object ? '}' : ']'))
                FAIL(DAMAGED);
            p++;
            level--;
        }
        continue;
    key:
        if (*p != '"')
            FAIL(DAMAGED);
        p = string(s, p + 1, end);
        if (!p)
            return NULL;
        p = space(p, end);
        NEED();
        if (*p != ':')
            FAIL(DAMAGED);
        p = space(p + 1, end);
    }
}

/* --- plain values -------------------------------------------------------------------------------------------------- */

/* Adds up to 18 digits to *n and counts them in *count; eight at a time, since a loop over bytes guesses its end wrong. */
static inline const u8 *digit_run(const u8 *p, const u8 *end, i64 *n, int *count)
{
    int total = 0;
    i64 sum = 0;
#if defined(LITTLE_ENDIAN_WORDS)
    static const i64 power[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};
    while (end - p >= 8 && total <= 8) {
        u64 v = load8(p) ^ 0x3030303030303030u;
        u64 other = (((v & 0x7F7F7F7F7F7F7F7Fu) + 0x7676767676767676u) | v) & 0x8080808080808080u;
        int length = other ? __builtin_ctzll(other) >> 3 : 8;
        if (!length)
            break;
        v <<= (8 - length) * 8;
        v = (v * 2561) >> 8 & 0x00FF00FF00FF00FFu;
        v = (v * 6553601) >> 16 & 0x0000FFFF0000FFFFu;
        sum = sum * power[length] + (i64)((v * 42949672960001u) >> 32);
        p += length;
        total += length;
        if (length < 8)
            goto done;
    }
#endif
    while (p < end && is_digit(*p) && total < 18) {
        sum = sum * 10 + (*p++ - '0');
        total++;
    }
#if defined(LITTLE_ENDIAN_WORDS)
done:
#endif
    *n = sum;
    *count = total;
    return p;
}

/* An integer of up to 18 digits, else NULL without a reason: then it is for value() to judge. */
static inline const u8 *plain_int(const u8 *p, const u8 *end, i64 *out)
{
    int minus = p < end && *p == '-', count;
    const u8 *from = p + minus;
    i64 n;
    p = digit_run(from, end, &n, &count);
    if (!count || p == end || (*from == '0' && count > 1) || !is_delimiter(*p))
        return NULL;
    *out = minus ? -n : n;
    return p;
}

/* Decimal microseconds to nanoseconds, half to even; bounded as in times.py, which judges the rest. */
static const u8 *plain_time(const u8 *p, const u8 *end, i64 *out)
{
    int minus = p < end && *p == '-', count;
    const u8 *from = p + minus;
    i64 ns;
    p = digit_run(from, end, &ns, &count);
    if (!count || p == end || ns > 4611686018427386 || (*from == '0' && count > 1))
        return NULL;
    ns *= 1000;
    if (*p == '.') {
        i64 unit = 100;
        int half = 0, rest = 0;
        from = ++p;
        for (; p < end && is_digit(*p) && p - from < 100; p++) {
            int digit = *p - '0';
            if (unit)
                ns += digit * unit;
            else if (p - from == 3)
                half = digit;
            else
                rest |= digit;
            unit /= 10;
        }
        if (p == from || p == end)
            return NULL;
        ns += half > 5 || (half == 5 && (rest || (ns & 1)));
    }
    if (!is_delimiter(*p))
        return NULL;
    *out = minus ? -ns : ns;
    return p;
}

/* A quoted text that could be read as an integer is for the slow reader; "0x0" and its like are text. */
static int quoted_number(span text)
{
    return text.len > 2 && text.at[0] == '"' && (is_digit(text.at[1]) || text.at[1] == '-' || text.at[1] == '+') &&
           !(text.len > 3 && (text.at[2] == 'x' || text.at[2] == 'X'));
}

/* An integer member that may stand only once; anything else makes the element odd. */
static const u8 *int_member(scan *s, const u8 *p, const u8 *end, i64 *out, int again)
{
    const u8 *after = plain_int(p, end, out);
    if (!after || again)
        s->odd = 1;
    return after ? after : value(s, p, end);
}

static const u8 *text_member(scan *s, const u8 *p, const u8 *end, span *out, int again)
{
    const u8 *at = p;
    NEED();
    if (*p != '"' || again)
        s->odd = 1;
    p = value(s, p, end);
    if (p)
        *out = (span){at + 1, p - at - 2};
    return p;
}

/* --- members of an object ------------------------------------------------------------------------------------------ */

/* A macro, so that the length is a constant and the comparison a few instructions. */
#define is(key, text) ((key).len == (i64)sizeof(text) - 1 && !memcmp((key).at, text, sizeof(text) - 1))

/* Reads `"key" :` and the blanks after it; an escaped key makes the element odd and matches nothing. */
static const u8 *key_of(scan *s, const u8 *p, const u8 *end, span *key)
{
    NEED();
    if (*p != '"')
        FAIL(DAMAGED);
    s->escaped = 0;
    key->at = p + 1;
    p = string(s, p + 1, end);
    if (!p)
        return NULL;
    key->len = p - 1 - key->at;
    if (s->escaped) {
        s->odd = 1;
        key->len = 0;
    }
    p = space(p, end);
    NEED();
    if (*p != ':')
        FAIL(DAMAGED);
    p = space(p + 1, end);
    NEED();
    return p;
}

/* After a member: 1 another one follows, 0 the object has ended, -1 failed. */
static int next_member(scan *s, const u8 **at, const u8 *end)
{
    const u8 *p = space(*at, end);
    if (p < end && *p == '}') {
        *at = p + 1;
        return 0;
    }
    if (p == end || *p != ',') {
        s->why = p == end ? MORE : DAMAGED;
        s->stop = p;
        return -1;
    }
    *at = space(p + 1, end);
    return 1;
}

/* After the opening brace: 1 a member follows, 0 the object is empty. */
static int first_member(const u8 **at, const u8 *end)
{
    const u8 *p = space(*at, end);
    int empty = p < end && *p == '}';
    *at = p + empty;
    return !empty;
}

/* Levels of objects whose keys have a meaning; each has a place that stands for its opening brace. */
enum { OUTER, INNER, NO_PLACE, FIXED_PLACES };
enum { OBJECT_END = -1, FAILED = -2 };

static int event_action(int level, span key);
static int node_action(int level, span key);

/* Place of a key; NO_PLACE where it is too long or there are too many. */
static place *place_of(scan *s, int level, span key, int action)
{
    if (key.len > MAX_KEY)
        return &s->places[NO_PLACE];
    u64 at = hash_of(key.at, key.len, s->seed + (u64)level);
    for (;; at++) {
        u8 *slot = &s->place_slot[at % PLACE_SLOTS];
        if (!*slot) {
            if (s->num_places == MAX_PLACES)
                return &s->places[NO_PLACE];
            *slot = (u8)s->num_places;
            break;
        }
        place *known = &s->places[*slot];
        if (known->level == level && known->key_len == key.len && !memcmp(known->key, key.at, (size_t)key.len))
            return known;
    }
    place *fresh = &s->places[s->num_places];
    if (key.len)
        memcpy(fresh->key, key.at, (size_t)key.len);
    fresh->key_len = (i32)key.len;
    fresh->level = level;
    fresh->action = action;
    s->num_places++;
    return fresh;
}

static void learn(place *from, const u8 *text, i64 len, place *to, i64 key_at)
{
    if (len > GUESS_BYTES)
        return;
    guess *g = &from->next[from->turn++ % GUESSES];
    memset(g, 0, sizeof *g);
    memcpy(g->text, text, (size_t)len);
    memset(g->mask, 0xFF, (size_t)len);
    g->len = (i32)len;
    g->to = to;
    g->key_at = (i32)key_at;
    g->key_len = to->key_len;
    g->action = to->action;
}

/* Goes to the value of the next member of an object. *from is the place of the member before, or that of the opening
 * brace, and becomes the place of this one. Returns what to do with the value, OBJECT_END or FAILED. */
static inline int next_key(scan *s, int level, place **from, const u8 **at, const u8 *end, span *key)
{
    place *before = *from;
    const u8 *start = *at, *p = start;
    if (p < end && *p == '}') {
        *at = p + 1;
        return OBJECT_END;
    }
    if (end - p > GUESS_BYTES) {
        const u64 a = load8(p), b = load8(p + 8), c = load8(p + 16), d = load8(p + 24);
        for (int i = 0; i < GUESSES; i++) {
            const guess *g = &before->next[i];
            if ((a ^ g->text[0]) & g->mask[0])
                continue;
            if ((((b ^ g->text[1]) & g->mask[1]) | ((c ^ g->text[2]) & g->mask[2]) | ((d ^ g->text[3]) & g->mask[3])) ||
                !g->len)
                continue;
            p += g->len;
            if (*p <= ' ') {
                p = space(p, end);
                if (p == end)
                    break;   /* the slow way says so */
            }
            key->at = start + g->key_at;
            key->len = g->key_len;
            *from = g->to;
            *at = p;
            return g->action;
        }
    }
    place *none = &s->places[NO_PLACE];
    int more = before < none ? first_member(at, end) : next_member(s, at, end);
    if (more <= 0)
        return more ? FAILED : OBJECT_END;
    p = key_of(s, *at, end, key);
    if (!p)
        return FAILED;
    *at = p;
    int action = s->host ? node_action(level, *key) : event_action(level, *key);
    place *to = s->escaped ? none : place_of(s, level, *key, action);
    if (before != none && to != none)
        learn(before, start, p - start, to, key->at - start);
    *from = to;
    return action;
}

/* Members without a column, and whether one of their keys stands twice. */
typedef struct {
    member list[MAX_RESIDUE];
    int n;
    u64 seen;
} residue;

static void keep_member(scan *s, residue *r, span key, span text)
{
    if (r->n == MAX_RESIDUE) {
        s->odd = 1;
        return;
    }
    u64 bit = 1;
    if (key.len)
        bit <<= (key.len * 7 + key.at[0] * 3 + key.at[key.len - 1]) & 63;
    if (r->seen & bit)
        for (int i = 0; i < r->n; i++)
            if (r->list[i].key.len == key.len && !memcmp(r->list[i].key.at, key.at, (size_t)key.len))
                s->odd = 1;
    r->seen |= bit;
    r->list[r->n++] = (member){key, text};
}

static int room_for(scan *s, i64 len)
{
    return s->scratch_len + len <= s->scratch_room || grow(&s->scratch, &s->scratch_room, s->scratch_len + len, 1);
}

/* Copies by 16 bytes, past the end of `from` only where its buffer goes on; `to` has room for 16 more. */
static inline void copy(u8 *to, const u8 *from, i64 len, const u8 *end)
{
    if (end - from < len + 16) {
        memcpy(to, from, (size_t)len);
        return;
    }
    for (i64 i = 0; i < len; i += 16)
        memcpy(to + i, from + i, 16);
}

static int put_member(scan *s, span key, span text, const u8 *end)
{
    if (!room_for(s, key.len + text.len + 24))
        return 0;
    u8 *to = s->scratch + s->scratch_len;
    *to++ = s->scratch_len ? ',' : '{';
    *to++ = '"';
    copy(to, key.at, key.len, end);
    to += key.len;
    *to++ = '"';
    *to++ = ':';
    copy(to, text.at, text.len, end);
    s->scratch_len = to + text.len - s->scratch;
    return 1;
}

/* Code of the object put together in scratch; -1 and *ok for an empty one. */
static i32 residue_code(scan *s, dict *d, int *ok)
{
    if (!s->scratch_len)
        return -1;
    s->scratch[s->scratch_len++] = '}';   /* put_member left room */
    i32 code = code_of(s, d, s->scratch, s->scratch_len);
    *ok &= code >= 0;
    return code;
}

static i32 span_code(scan *s, dict *d, span text, int *ok)
{
    if (text.len < 0)
        return -1;
    i32 code = code_of(s, d, text.at, text.len);
    *ok &= code >= 0;
    return code;
}

/* --- device events ------------------------------------------------------------------------------------------------- */

typedef struct {
    span phase, category, name, shapes, types;
    i64 ints[D_INTS];
    i64 wide[N_WIDE];
    u64 seen, promoted;
    residue args;
} event;

static int promoted_to(span key)
{
    switch (key.len) {
    case 4:
        return is(key, "Addr") ? P_WIDE + W_ADDR : P_NONE;
    case 5:
        return is(key, "Bytes") ? P_WIDE + W_BYTES : is(key, "bytes") ? P_WIDE + W_COPY_BYTES : P_NONE;
    case 6:
        return is(key, "stream") ? 5 : is(key, "device") ? 4 : is(key, "Ev Idx") ? P_WIDE + W_EV_IDX : P_NONE;
    case 9:
        return is(key, "Python id") ? P_WIDE + W_PYTHON_ID : P_NONE;
    case 10:
        return is(key, "Input Dims") ? P_SHAPES : is(key, "Input type") ? P_TYPES : P_NONE;
    case 11:
        if (is(key, "External id") || is(key, "external id") || is(key, "External Id"))
            return 0;
        return is(key, "correlation") ? 2 : P_NONE;
    case 14:
        return is(key, "Correlation ID") ? 2 : is(key, "Total Reserved") ? P_WIDE + W_RESERVED : P_NONE;
    case 15:
        return is(key, "Sequence number") ? 3 : is(key, "Total Allocated") ? P_WIDE + W_ALLOCATED : P_NONE;
    case 16:
        return is(key, "Python parent id") ? P_WIDE + W_PYTHON_PARENT
               : is(key, "Python module id") ? P_WIDE + W_PYTHON_MODULE : P_NONE;
    case 18:
        return is(key, "Record function id") ? 1 : P_NONE;
    case 20:
        return is(key, "Profiler Event Index") ? P_WIDE + W_EVENT_INDEX : P_NONE;
    case 21:
        return is(key, "wait_on_cuda_event_id") ? P_WIDE + W_WAIT_EVENT : P_NONE;
    case 33:
        return is(key, "wait_on_cuda_event_record_corr_id") ? P_WIDE + W_WAIT_RECORD : P_NONE;
    }
    return P_NONE;
}

static const u8 *arg_member(scan *s, event *e, int to, span key, const u8 *p, const u8 *end)
{
    const u8 *at = p, *after = NULL;
    if (to != P_NONE) {
        if (e->promoted >> to & 1)
            s->odd = 1;
        e->promoted |= (u64)1 << to;
        if (to != P_SHAPES && to != P_TYPES) {
            after = plain_int(p, end, to < P_WIDE ? &e->ints[D_EXTERNAL + to] : &e->wide[to - P_WIDE]);
            if (after)
                return after;
        }
    }
    p = value(s, p, end);
    if (!p)
        return NULL;
    span text = {at, p - at};
    if (to == P_SHAPES)
        e->shapes = text;
    else if (to == P_TYPES)
        e->types = text;
    else {
        /* A quoted integer may become an id; a sparse column takes plain ones only. */
        if (to < P_WIDE && (quoted_number(text) || is_digit(*at) || *at == '-'))
            s->odd = 1;
        keep_member(s, &e->args, key, text);
    }
    return p;
}

static const u8 *event_args(scan *s, event *e, const u8 *p, const u8 *end)
{
    if (*p != '{') {
        s->odd = 1;
        return value(s, p, end);
    }
    p++;
    s->around = 2;
    for (place *at = &s->places[INNER];;) {
        span key;
        int to = next_key(s, INNER, &at, &p, end, &key);
        if (to < 0) {
            s->around = 1;
            return to == OBJECT_END ? p : NULL;
        }
        p = arg_member(s, e, to, key, p, end);
        if (!p)
            return NULL;
    }
}

/* A pid or tid: "Spans" and its like are no process or thread. */
static const u8 *track_member(scan *s, const u8 *p, const u8 *end, i64 *out, int again)
{
    if (*p != '"')
        return int_member(s, p, end, out, again);
    const u8 *at = p;
    s->escaped = 0;
    p = value(s, p, end);
    if (p && (again || s->escaped || quoted_number((span){at, p - at})))
        s->odd = 1;
    return p;
}

static const u8 *time_member(scan *s, const u8 *p, const u8 *end, i64 *out, int again)
{
    const u8 *after = plain_time(p, end, out);
    if (!after || again)
        s->odd = 1;
    return after ? after : value(s, p, end);
}

enum { E_PHASE, E_CATEGORY, E_NAME, E_PID, E_TID, E_TS, E_DUR, E_ARGS, E_OTHER };

static int event_action(int level, span key)
{
    if (level == INNER)
        return promoted_to(key);
    switch (key.len) {
    case 2:
        return is(key, "ph") ? E_PHASE : is(key, "ts") ? E_TS : E_OTHER;
    case 3:
        return is(key, "cat") ? E_CATEGORY : is(key, "pid") ? E_PID : is(key, "tid") ? E_TID : is(key, "dur") ? E_DUR
               : E_OTHER;
    case 4:
        return is(key, "name") ? E_NAME : is(key, "args") ? E_ARGS : E_OTHER;
    }
    return E_OTHER;
}

static const u8 *event_member(scan *s, event *e, int what, const u8 *p, const u8 *end)
{
    int again = (int)(e->seen >> what & 1);
    e->seen |= (u64)1 << what;
    switch (what) {
    case E_PHASE:
        s->escaped = 0;
        p = text_member(s, p, end, &e->phase, again);
        s->odd |= s->escaped;
        return p;
    case E_CATEGORY:
        return text_member(s, p, end, &e->category, again);
    case E_NAME:
        return text_member(s, p, end, &e->name, again);
    case E_PID:
        return track_member(s, p, end, &e->ints[D_PID], again);
    case E_TID:
        return track_member(s, p, end, &e->ints[D_TID], again);
    case E_TS:
        return time_member(s, p, end, &e->ints[D_TS], again);
    case E_DUR:
        return time_member(s, p, end, &e->ints[D_DUR], again);
    case E_ARGS:
        s->odd |= again;
        return event_args(s, e, p, end);
    }
    return value(s, p, end);
}

static int add_sparse(sparse *w, i64 row, i64 value)
{
    if (w->n == w->cap) {
        i64 cap = w->cap, same = w->cap;
        if (!grow(&w->row, &cap, w->n + 1, sizeof(i64)) || !grow(&w->value, &same, w->n + 1, sizeof(i64)))
            return 0;
        w->cap = cap;
    }
    w->row[w->n] = row;
    w->value[w->n++] = value;
    return 1;
}

static int add_event(scan *s, event *e, const u8 *end)
{
    int ok = 1;
    i32 category = span_code(s, &s->dicts[D_CATEGORY], e->category, &ok);
    if (!ok)
        return 0;
    s->elements++;
    if (category >= 0)
        s->dicts[D_CATEGORY].count[category]++;
    u8 phase = e->phase.len == 1 ? *e->phase.at : 0;
    if (phase != 'X' && phase != 'i' && phase != 'I')
        return 1;
    i64 row = new_row(s);
    if (row < 0)
        return 0;
    /* Kineto writes 0 where there is no record function; a correlation of 0 joins nothing either. */
    if (!e->ints[D_RECORD])
        e->ints[D_RECORD] = MISSING;
    if (!e->ints[D_CORRELATION])
        e->ints[D_CORRELATION] = MISSING;
    for (int i = 0; i < D_INTS; i++)
        s->ints[i * BLOCK_ROWS + row] = e->ints[i];
    s->scratch_len = 0;
    for (int i = 0; i < e->args.n; i++)
        if (!put_member(s, e->args.list[i].key, e->args.list[i].value, end))
            return 0;
    s->codes[D_ARGS * BLOCK_ROWS + row] = residue_code(s, &s->dicts[D_ARGS], &ok);
    s->codes[D_PHASE * BLOCK_ROWS + row] = span_code(s, &s->dicts[D_PHASE], e->phase, &ok);
    s->codes[D_CATEGORY * BLOCK_ROWS + row] = category;
    s->codes[D_NAME * BLOCK_ROWS + row] = span_code(s, &s->dicts[D_NAME], e->name, &ok);
    s->codes[D_SHAPES * BLOCK_ROWS + row] = span_code(s, &s->dicts[D_SHAPES], e->shapes, &ok);
    s->codes[D_TYPES * BLOCK_ROWS + row] = span_code(s, &s->dicts[D_TYPES], e->types, &ok);
    for (u64 left = e->promoted >> P_WIDE, i = 0; left; left >>= 1, i++)
        if ((left & 1) && e->wide[i] != MISSING)
            ok &= add_sparse(&s->wide[i], s->rows, e->wide[i]);
    s->rows += ok;
    return ok;
}

static const u8 *read_event(scan *s, const u8 *p, const u8 *end)
{
    event e;
    const span absent = {NULL, -1};
    e.phase = e.category = e.name = e.shapes = e.types = absent;
    e.seen = e.promoted = e.args.seen = 0;
    e.args.n = 0;
    for (int i = 0; i < D_INTS; i++)
        e.ints[i] = MISSING;
    for (int i = 0; i < N_WIDE; i++)
        e.wide[i] = MISSING;
    p++;
    for (place *at = &s->places[OUTER];;) {
        span key;
        int what = next_key(s, OUTER, &at, &p, end, &key);
        if (what == OBJECT_END)
            break;
        p = what == FAILED ? NULL : event_member(s, &e, what, p, end);
        if (!p)
            return NULL;
    }
    if (e.name.len < 0)
        s->odd = 1;   /* what an event without a name is called is decided in one place */
    if (!s->odd && !s->deep && !add_event(s, &e, end))
        FAIL(NO_MEMORY);
    return p;
}

/* --- host nodes ---------------------------------------------------------------------------------------------------- */

enum { IO_VALUES, IO_SHAPES, IO_TYPES, IO_STRIDES, N_IO };

typedef struct {
    span name, op_schema;
    span in[N_IO], out[N_IO];
    i64 ints[H_INTS];
    u64 seen, attr_seen;
    int flat, nested;   /* which of the two layouts its keys belong to */
    residue attrs;
} node;

static const u8 *raw_member(scan *s, const u8 *p, const u8 *end, span *out)
{
    const u8 *at = p;
    if (out->len >= 0)
        s->odd = 1;
    p = value(s, p, end);
    if (p)
        *out = (span){at, p - at};
    return p;
}

/* inputs or outputs: an object of four arrays, in the flat layout the array of values alone. */
static const u8 *io_member(scan *s, node *n, span *io, const u8 *p, const u8 *end)
{
    if (*p == '[') {
        n->flat = 1;
        return raw_member(s, p, end, &io[IO_VALUES]);
    }
    if (*p != '{') {
        s->odd = 1;
        return value(s, p, end);
    }
    n->nested = 1;
    p++;
    s->around = 2;
    for (place *at = &s->places[INNER];;) {
        span key;
        int part = next_key(s, INNER, &at, &p, end, &key);
        if (part < 0) {
            s->around = 1;
            return part == OBJECT_END ? p : NULL;
        }
        p = part == N_IO ? value(s, p, end) : raw_member(s, p, end, &io[part]);
        if (!p)
            return NULL;
    }
}

static int int_attr(span key)
{
    switch (key.len) {
    case 3:
        return is(key, "tid") ? H_TID : -1;
    case 5:
        return is(key, "rf_id") ? H_RF_ID : is(key, "scope") ? H_SCOPE : -1;
    case 6:
        return is(key, "seq_id") ? H_SEQ_ID : is(key, "fw_tid") ? H_FW_TID : -1;
    case 9:
        return is(key, "fw_parent") ? H_FW_PARENT : -1;
    }
    return -1;
}

/* Keeps an attribute whose name and value have been read. */
static void keep_attr(scan *s, node *n, span name, span text, int to)
{
    if (to < 0) {
        /* These two beginnings are those of the members that add_node puts beside the attributes. */
        if ((name.len > 6 && !memcmp(name.at, "input_", 6)) || (name.len > 7 && !memcmp(name.at, "output_", 7)))
            s->odd = 1;
        if (!is(text, "\"\""))
            keep_member(s, &n->attrs, name, text);
        return;
    }
    /* The object around it ends in a brace at the latest, so there is a byte after the value. */
    if (n->attr_seen >> to & 1 || plain_int(text.at, text.at + text.len + 1, &n->ints[to]) != text.at + text.len)
        s->odd = 1;
    n->attr_seen |= (u64)1 << to;
}

/* One of attrs: {"name": ..., "type": ..., "value": ...} in any order; `start` is where the one before ended. */
static const u8 *attr(scan *s, node *n, attr_guess *g, const u8 *start, const u8 *p, const u8 *end)
{
    span name = {NULL, -1}, text = {NULL, -1};
    if (*p != '{') {
        s->odd = 1;
        s->around = 2;
        p = value(s, p, end);
        s->around = 3;
        return p;
    }
    p++;
    int more = first_member(&p, end), value_last = 0;
    while (more > 0) {
        span key;
        p = key_of(s, p, end, &key);
        if (!p)
            return NULL;
        value_last = is(key, "value");
        if (is(key, "name")) {
            s->escaped = 0;
            p = text_member(s, p, end, &name, name.len >= 0);
            s->odd |= s->escaped;
        } else if (value_last) {
            p = raw_member(s, p, end, &text);
        } else {
            p = value(s, p, end);
        }
        if (!p)
            return NULL;
        more = next_member(s, &p, end);
    }
    if (more < 0)
        return NULL;
    if (name.len < 0 || text.len < 0) {
        s->odd = 1;
        return p;
    }
    int to = int_attr(name);
    keep_attr(s, n, name, text, to);
    if (g && value_last && !s->odd && text.at - start <= ATTR_BYTES) {
        g->len = (i32)(text.at - start);
        memcpy(g->text, start, (size_t)g->len);
        g->name_at = (i32)(name.at - start);
        g->name_len = (i32)name.len;
        g->to = to;
    }
    return p;
}

/* The attribute that stood here in the node before, with another value; NULL if it is not that one. */
static const u8 *guessed_attr(scan *s, node *n, const attr_guess *g, const u8 *start, const u8 *end)
{
    if (!g->len || end - start <= g->len || memcmp(start, g->text, (size_t)g->len))
        return NULL;
    const u8 *at = start + g->len;
    if (*at <= ' ')
        return NULL;
    const u8 *p = value(s, at, end);
    if (!p || p == end || *p != '}')
        return NULL;
    keep_attr(s, n, (span){start + g->name_at, g->name_len}, (span){at, p - at}, g->to);
    return p + 1;
}

static const u8 *attrs_member(scan *s, node *n, const u8 *p, const u8 *end)
{
    if (*p != '[') {
        s->odd = 1;
        return value(s, p, end);
    }
    p++;
    s->around = 3;
    for (int i = 0;; i++) {
        attr_guess *g = i < MAX_ATTRS ? &s->attrs[i] : NULL;
        const u8 *start = p;
        p = g ? guessed_attr(s, n, g, start, end) : NULL;
        if (p)
            continue;
        p = space(start, end);
        NEED();
        if (*p == ']') {
            s->around = 1;
            return p + 1;
        }
        if (i) {
            if (*p != ',')
                FAIL(DAMAGED);
            p = space(p + 1, end);
            NEED();
        }
        p = attr(s, n, g, start, p, end);
        if (!p)
            return NULL;
    }
}

enum {
    N_ID, N_NAME, N_CTRL_DEPS, N_PARENT, N_INPUTS, N_OUTPUTS, N_ATTRS, N_IN_SHAPES, N_IN_TYPES, N_OUT_SHAPES,
    N_OUT_TYPES, N_OP_SCHEMA, N_INT, N_OTHER = N_INT + H_INTS
};

static int node_action(int level, span key)
{
    if (level == INNER)
        return is(key, "values") ? IO_VALUES : is(key, "shapes") ? IO_SHAPES : is(key, "types") ? IO_TYPES
               : is(key, "strides") ? IO_STRIDES : N_IO;
    int attr = int_attr(key);
    if (attr >= 0)
        return N_INT + attr;
    return is(key, "id") ? N_ID : is(key, "name") ? N_NAME : is(key, "ctrl_deps") ? N_CTRL_DEPS
           : is(key, "parent") ? N_PARENT : is(key, "inputs") ? N_INPUTS : is(key, "outputs") ? N_OUTPUTS
           : is(key, "attrs") ? N_ATTRS : is(key, "input_shapes") ? N_IN_SHAPES : is(key, "input_types") ? N_IN_TYPES
           : is(key, "output_shapes") ? N_OUT_SHAPES : is(key, "output_types") ? N_OUT_TYPES
           : is(key, "op_schema") ? N_OP_SCHEMA : N_OTHER;
}

static const u8 *node_member(scan *s, node *n, int what, const u8 *p, const u8 *end)
{
    int again = (int)(n->seen >> what & 1);
    n->seen |= (u64)1 << what;
    if (what >= N_IN_SHAPES && what < N_OTHER)
        n->flat = 1;
    if (what >= N_INT && what < N_OTHER)
        return int_member(s, p, end, &n->ints[what - N_INT], again);
    s->odd |= again && what != N_OTHER;
    switch (what) {
    case N_ID:
        return int_member(s, p, end, &n->ints[H_ID], again);
    case N_NAME:
        return text_member(s, p, end, &n->name, again);
    case N_CTRL_DEPS:
        return int_member(s, p, end, &n->ints[H_CTRL_DEPS], again);
    case N_PARENT:
        return int_member(s, p, end, &n->ints[H_PARENT], again);
    case N_INPUTS:
        return io_member(s, n, n->in, p, end);
    case N_OUTPUTS:
        return io_member(s, n, n->out, p, end);
    case N_ATTRS:
        n->nested = 1;
        return attrs_member(s, n, p, end);
    case N_IN_SHAPES:
        return raw_member(s, p, end, &n->in[IO_SHAPES]);
    case N_IN_TYPES:
        return raw_member(s, p, end, &n->in[IO_TYPES]);
    case N_OUT_SHAPES:
        return raw_member(s, p, end, &n->out[IO_SHAPES]);
    case N_OUT_TYPES:
        return raw_member(s, p, end, &n->out[IO_TYPES]);
    case N_OP_SCHEMA:
        return raw_member(s, p, end, &n->op_schema);
    }
    return value(s, p, end);
}

static int put_text(scan *s, const char *key, span text, const u8 *end)
{
    i64 len = (i64)strlen(key);
    if (text.len < 0)
        return 1;
    if (!room_for(s, len + text.len + 24))
        return 0;
    u8 *to = s->scratch + s->scratch_len;
    *to++ = s->scratch_len ? ',' : '{';
    *to++ = '"';
    memcpy(to, key, (size_t)len);
    to += len;
    *to++ = '"';
    *to++ = ':';
    copy(to, text.at, text.len, end);
    s->scratch_len = to + text.len - s->scratch;
    return 1;
}

static int add_node(scan *s, node *n, const u8 *end)
{
    int ok = 1;
    const span none = {(const u8 *)"[]", 2};
    i64 row = new_row(s);
    if (row < 0)
        return 0;
    /* The observer writes 0 for no record function, -1 for no sequence number. */
    if (!n->ints[H_RF_ID])
        n->ints[H_RF_ID] = MISSING;
    if (n->ints[H_SEQ_ID] < 0)
        n->ints[H_SEQ_ID] = MISSING;
    for (int i = 0; i < H_INTS; i++)
        s->ints[i * BLOCK_ROWS + row] = n->ints[i];
    s->scratch_len = 0;
    ok &= put_text(s, "input_strides", n->in[IO_STRIDES], end) && put_text(s, "output_shapes", n->out[IO_SHAPES], end) &&
          put_text(s, "output_types", n->out[IO_TYPES], end) && put_text(s, "output_strides", n->out[IO_STRIDES], end);
    if (n->op_schema.len >= 0 && !is(n->op_schema, "\"\""))
        ok &= put_text(s, "op_schema", n->op_schema, end);
    for (int i = 0; ok && i < n->attrs.n; i++)
        ok &= put_member(s, n->attrs.list[i].key, n->attrs.list[i].value, end);
    if (!ok)
        return 0;
    s->codes[H_DETAILS * BLOCK_ROWS + row] = residue_code(s, &s->dicts[H_DETAILS], &ok);
    s->codes[H_NAME * BLOCK_ROWS + row] = span_code(s, &s->dicts[H_NAME], n->name, &ok);
    s->codes[H_IN_SHAPES * BLOCK_ROWS + row] = span_code(s, &s->dicts[H_IN_SHAPES], n->in[IO_SHAPES].len < 0 ? none : n->in[IO_SHAPES], &ok);
    s->codes[H_IN_TYPES * BLOCK_ROWS + row] = span_code(s, &s->dicts[H_IN_TYPES], n->in[IO_TYPES].len < 0 ? none : n->in[IO_TYPES], &ok);
    s->codes[H_IN_VALUES * BLOCK_ROWS + row] = span_code(s, &s->dicts[H_IN_VALUES], n->in[IO_VALUES].len < 0 ? none : n->in[IO_VALUES], &ok);
    s->codes[H_OUT_VALUES * BLOCK_ROWS + row] = span_code(s, &s->dicts[H_OUT_VALUES], n->out[IO_VALUES].len < 0 ? none : n->out[IO_VALUES], &ok);
    s->rows += ok;
    s->elements += ok;
    return ok;
}

static const u8 *read_node(scan *s, const u8 *p, const u8 *end)
{
    node n;
    const span absent = {NULL, -1};
    n.name = n.op_schema = absent;
    for (int i = 0; i < N_IO; i++)
        n.in[i] = n.out[i] = absent;
    for (int i = 0; i < H_INTS; i++)
        n.ints[i] = MISSING;
    n.seen = n.attr_seen = n.attrs.seen = 0;
    n.attrs.n = n.flat = n.nested = 0;
    p++;
    for (place *at = &s->places[OUTER];;) {
        span key;
        int what = next_key(s, OUTER, &at, &p, end, &key);
        if (what == OBJECT_END)
            break;
        p = what == FAILED ? NULL : node_member(s, &n, what, p, end);
        if (!p)
            return NULL;
    }
    if (n.ints[H_ID] == MISSING || n.name.len < 0 || (n.flat && n.nested))
        s->odd = 1;
    /* The slow reader takes a node without attrs as flat, one with attrs as nested. */
    if (!(n.seen >> N_ATTRS & 1) != !n.nested)
        s->odd = 1;
    if (!s->odd && !s->deep && !add_node(s, &n, end))
        FAIL(NO_MEMORY);
    return p;
}

/* --- what the caller sees ------------------------------------------------------------------------------------------ */

scan *cc_new(int host, u64 seed)
{
    scan *s = calloc(1, sizeof(scan));
    if (s) {
        s->host = host;
        s->seed = seed;
        s->num_places = FIXED_PLACES;
    }
    return s;
}

void cc_free(scan *s)
{
    if (!s)
        return;
    for (i64 i = 0; i < s->blocks; i++)
        free(s->block[i]);
    free(s->block);
    for (int i = 0; i < MAX_CODES; i++) {
        free(s->dicts[i].text);
        free(s->dicts[i].end);
        free(s->dicts[i].hash);
        free(s->dicts[i].count);
        free(s->dicts[i].slot);
    }
    for (int i = 0; i < MAX_WIDE; i++) {
        free(s->wide[i].row);
        free(s->wide[i].value);
    }
    free(s->scratch);
    free(s);
}

void cc_set_state(scan *s, int state) { s->state = state; }
int cc_state(const scan *s) { return s->state; }

/* Reads elements from buf[pos] on until one stops it; the array's opening bracket lies before.
 * out[0]: where to go on (MORE: start of what is not whole; END: after the bracket; else start of the element),
 * out[1]: where that element ends (ODD) or where it failed. */
int cc_elements(scan *s, const u8 *buf, i64 len, i64 pos, i64 *out)
{
    const u8 *p = buf + pos, *end = buf + len;
    for (;;) {
        p = space(p, end);
        out[0] = out[1] = p - buf;
        if (p == end)
            return MORE;
        if (s->state == AFTER_ELEMENT) {
            if (*p == ',') {
                s->state = AFTER_COMMA;
                p++;
                continue;
            }
            if (*p != ']')
                return DAMAGED;
        }
        if (*p == ']') {
            out[0]++;
            return END;
        }
        if (*p != '{')
            return DAMAGED;
        s->odd = s->deep = 0;
        s->around = 1;
        const u8 *after = s->host ? read_node(s, p, end) : read_event(s, p, end);
        if (!after) {
            out[1] = s->stop - buf;
            return s->why;
        }
        s->state = AFTER_ELEMENT;
        if (s->odd || s->deep) {
            out[1] = after - buf;
            return ODD;
        }
        p = after;
    }
}

/* Skips one value of the file's head or tail: END with out[0] after it, else the reason. */
int cc_value(scan *s, const u8 *buf, i64 len, i64 pos, i64 *out)
{
    s->around = 0;
    const u8 *after = value(s, buf + pos, buf + len);
    if (!after)
        return s->why;
    out[0] = after - buf;
    return END;
}

/* Changes with the arguments of these functions, see compiled.py. */
int cc_interface(void) { return 2; }

i64 cc_rows(const scan *s) { return s->rows; }
i64 cc_elements_read(const scan *s) { return s->elements; }
i64 cc_block_rows(void) { return BLOCK_ROWS; }

/* Smallest and largest value of an integer column, MISSING aside: out[0], out[1]; 0 and 0 where all are. */
void cc_range(const scan *s, int column, i64 *out)
{
    i64 low = INT64_MAX, high = MISSING;
    for (i64 begin = 0; begin < s->rows; begin += BLOCK_ROWS) {
        const i64 *from = (const i64 *)s->block[begin / BLOCK_ROWS] + (i64)column * BLOCK_ROWS;
        i64 n = s->rows - begin < BLOCK_ROWS ? s->rows - begin : BLOCK_ROWS;
        for (i64 i = 0; i < n; i++) {
            i64 v = from[i];
            high = v > high ? v : high;
            v = v == MISSING ? INT64_MAX : v;
            low = v < low ? v : low;
        }
    }
    out[0] = high == MISSING ? 0 : low;
    out[1] = high == MISSING ? 0 : high;
}

/* Copies n values into fewer bytes each; the smallest number that they hold stands for MISSING. */
#define NARROW(from_type, to_type, none)                                                                               \
    do {                                                                                                               \
        const from_type *from = (const from_type *)at;                                                                 \
        to_type *to = (to_type *)out + begin;                                                                          \
        for (i64 i = 0; i < n; i++)                                                                                    \
            to[i] = none && from[i] == (from_type)MISSING ? (to_type)none : (to_type)from[i];                          \
    } while (0)

/* Copies a column, codes after integers, in `width` bytes per value. */
void cc_take(const scan *s, int column, int width, void *out)
{
    int is_code = column >= num_ints(s);
    i64 offset = is_code ? (i64)num_ints(s) * BLOCK_ROWS * 8 + (i64)(column - num_ints(s)) * BLOCK_ROWS * 4
                         : (i64)column * BLOCK_ROWS * 8;
    for (i64 begin = 0; begin < s->rows; begin += BLOCK_ROWS) {
        const u8 *at = s->block[begin / BLOCK_ROWS] + offset;
        i64 n = s->rows - begin < BLOCK_ROWS ? s->rows - begin : BLOCK_ROWS;
        switch (is_code ? -width : width) {
        case 1: NARROW(i64, int8_t, INT8_MIN); break;
        case 2: NARROW(i64, int16_t, INT16_MIN); break;
        case 4: NARROW(i64, i32, INT32_MIN); break;
        case 8: memcpy((i64 *)out + begin, at, (size_t)n * 8); break;
        case -1: NARROW(i32, int8_t, 0); break;
        case -2: NARROW(i32, int16_t, 0); break;
        case -4: memcpy((i32 *)out + begin, at, (size_t)n * 4); break;
        }
    }
}

void cc_free_blocks(scan *s)
{
    for (i64 i = 0; i < s->blocks; i++) {
        free(s->block[i]);
        s->block[i] = NULL;
    }
}
const u8 *cc_block(const scan *s, i64 number) { return s->block[number]; }
void cc_free_block(scan *s, i64 number)
{
    free(s->block[number]);
    s->block[number] = NULL;
}
const u8 *cc_dict_text(const scan *s, int column) { return s->dicts[column].text; }
const i64 *cc_dict_ends(const scan *s, int column) { return s->dicts[column].end; }
const i64 *cc_dict_counts(const scan *s, int column) { return s->dicts[column].count; }
i64 cc_dict_size(const scan *s, int column) { return s->dicts[column].n; }
i64 cc_wide_size(const scan *s, int column) { return s->wide[column].n; }
const i64 *cc_wide_rows(const scan *s, int column) { return s->wide[column].row; }
const i64 *cc_wide_values(const scan *s, int column) { return s->wide[column].value; }
