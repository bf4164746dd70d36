/* Containment of half-open intervals on each track; see nest.py, which has the same loop in Python. */

#include <stdint.h>
#include <stdlib.h>

/* Changes with the arguments of the function below, see compiled.py. */
int cc_interface(void) { return 2; }

/* Rows are sorted by (track, start, -duration). ends is clipped to the parent's end in place. inside[i] sums the
 * clipped durations of the children of i. Returns 0, or -1 when memory for the stack is short. */
int cc_nest(int64_t size, const int32_t *track, const int64_t *starts, int64_t *ends, const uint8_t *opened,
            int32_t *parent, int64_t *inside, uint8_t *clipped)
{
    int32_t *stack = malloc((size_t)(size > 0 ? size : 1) * 2 * sizeof *stack);
    int32_t *owner = stack + size; /* of an open row: the row whose self time its children are taken from */
    int64_t depth = 0;

    if (!stack)
        return -1;
    for (int32_t row = 0; row < size; row++) {
        owner[row] = row;
        while (depth && (track[stack[depth - 1]] != track[row] || ends[stack[depth - 1]] <= starts[row]))
            depth--;
        if (depth) {
            int32_t top = stack[depth - 1];
            parent[row] = top;
            if (opened[row]) {
                ends[row] = ends[top];
                owner[row] = owner[top];
            } else {
                if (ends[row] > ends[top]) {
                    ends[row] = ends[top];
                    clipped[row] = 1;
                }
                inside[owner[top]] += ends[row] - starts[row];
            }
        }
        stack[depth++] = row;
    }
    free(stack);
    return 0;
}
