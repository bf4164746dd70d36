/* Records put together from what each has of its own and what it shares; see weave.py, which has the same in Python. */

#include <stdint.h>
#include <string.h>

/* Changes with the arguments of the function below, see compiled.py. */
int cc_interface(void) { return 1; }

/* Of each record: its own bytes, which follow each other in own, then those of its kind, which begin at first[kind] of
 * shared and end where the next kind begins. out has room for all. */
void cc_weave(int64_t size, const uint8_t *own, const int64_t *own_size, const uint8_t *shared, const int64_t *first,
              const int64_t *kind, uint8_t *out)
{
    for (int64_t record = 0; record < size; record++) {
        int64_t begin = first[kind[record]], length = first[kind[record] + 1] - begin;
        memcpy(out, own, (size_t)own_size[record]);
        out += own_size[record];
        own += own_size[record];
        memcpy(out, shared + begin, (size_t)length);
        out += length;
    }
}
