/* Preloaded into perftest in a virtual machine, which measures time with the cycle counter of the processor.
 *
 * perftest calibrates the counter against gettimeofday within two milliseconds. An emulated processor waits longer than that for a
 * real one, so that the result may be wrong by a factor, and every bandwidth with it. This gettimeofday counts cycles too, and was
 * calibrated for longer.
 */
#include <stdint.h>
#include <sys/time.h>
#include <time.h>
#include <x86intrin.h>

#define SPAN_NS 400000000ull
#define READS 200

static uint64_t first_ns, first_cycles;
static double cycles_per_ns;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* Read both at once: of several reads, that with the least time between two reads of the clock. */
static void read_both(uint64_t *ns, uint64_t *cycles)
{
    uint64_t least = UINT64_MAX;
    for (int read = 0; read < READS; read++) {
        uint64_t before = now_ns(), counter = __rdtsc(), after = now_ns();
        if (after - before < least) {
            least = after - before;
            *ns = before + least / 2;
            *cycles = counter;
        }
    }
}

__attribute__((constructor)) static void calibrate(void)
{
    struct timespec span = {0, SPAN_NS};
    uint64_t last_ns, last_cycles;
    read_both(&first_ns, &first_cycles);
    nanosleep(&span, 0);
    read_both(&last_ns, &last_cycles);
    cycles_per_ns = (double)(last_cycles - first_cycles) / (last_ns - first_ns);
}

int gettimeofday(struct timeval *restrict time, void *restrict zone)
{
    uint64_t ns = first_ns + (__rdtsc() - first_cycles) / cycles_per_ns;
    (void)zone;
    time->tv_sec = ns / 1000000000ull;
    time->tv_usec = ns / 1000 % 1000000;
    return 0;
}
