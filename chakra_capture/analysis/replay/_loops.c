/* Loops over the points of a graph, each of which needs what an earlier one gave; see loops.py, which has the same in
 * Python. */

#include <stdint.h>

/* Changes with the arguments of the functions below, see compiled.py. */
int cc_interface(void) { return 1; }

/* All points, each after those that it waits for; returns how many were found: those in a circle are not.
 * first: of each point where its followers begin in next, and the end. missing: of each how many it waits for. */
int64_t cc_order(int64_t size, const int32_t *first, const int32_t *next, int32_t *missing, int32_t *order)
{
    int64_t found = 0;

    for (int64_t point = 0; point < size; point++)
        if (!missing[point])
            order[found++] = (int32_t)point;
    for (int64_t at = 0; at < found; at++) {
        int32_t point = order[at];
        for (int32_t edge = first[point]; edge < first[point + 1]; edge++)
            if (!--missing[next[edge]])
                order[found++] = next[edge];
    }
    return found;
}

/* Has every point, in their order, reached by the latest of its edges, or stand at its time, if that is later.
 * first: of each place in the order where the edges to its point begin in edges and src, and the end. */
void cc_longest(int64_t size, const int32_t *points, const int32_t *first, const int32_t *edges, const int32_t *src,
                const int64_t *lag, int64_t *times)
{
    for (int64_t place = 0; place < size; place++) {
        int64_t time = times[points[place]];
        for (int32_t at = first[place]; at < first[place + 1]; at++) {
            int64_t reached = times[src[at]] + lag[edges[at]];
            if (reached > time)
                time = reached;
        }
        times[points[place]] = time;
    }
}

/* Of the edges to each point the one that its time is least behind, then that of the first kind, then that from the
 * first point; none (found stays) that it is further behind than most. */
void cc_reasons(int64_t size, const int32_t *src, const int32_t *dst, const int8_t *kind, const int64_t *lag,
                const int64_t *times, int64_t most, int32_t *found)
{
    for (int64_t edge = 0; edge < size; edge++) {
        int32_t best = found[dst[edge]];
        int64_t reached = times[src[edge]] + lag[edge];
        if (times[dst[edge]] - reached > most)
            continue;
        if (best >= 0) {
            int64_t before = times[src[best]] + lag[best];
            if (reached < before)
                continue;
            if (reached == before && (kind[edge] > kind[best] || (kind[edge] == kind[best] && src[edge] >= src[best])))
                continue;
        }
        found[dst[edge]] = (int32_t)edge;
    }
}

/* From a point back over what it waited for until a time; returns how many points, or -1 for more than most. */
int64_t cc_walk(const int32_t *before, const int64_t *times, int64_t begin, int32_t point, int64_t most, int32_t *found)
{
    int64_t count = 0;

    while (point >= 0 && times[point] > begin) {
        if (count == most)
            return -1;
        found[count++] = point;
        point = before[point];
    }
    return count;
}
