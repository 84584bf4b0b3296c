/*
 * A main for a fuzz target without libFuzzer: runs it once on each file named on the command line. tools/check-corpus-coverage
 * builds it with gcov to say how much of a parser the committed corpus reaches; it also replays a crash under a debugger.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

#define INPUT_MAX ((size_t)1 << 20)

int main(int argc, char **argv)
{
    uint8_t *p = malloc(INPUT_MAX);
    int i;

    if (p == NULL)
        return 1;
    for (i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        uint8_t *exact;
        size_t n;

        if (f == NULL) {
            perror(argv[i]);
            return 1;
        }
        n = fread(p, 1, INPUT_MAX, f);
        (void)fclose(f); /* only read */
        /* A copy of exactly n bytes: a read beyond them is seen by a sanitizer. */
        exact = malloc(n > 0 ? n : 1);
        if (exact == NULL)
            return 1;
        memcpy(exact, p, n);
        (void)LLVMFuzzerTestOneInput(exact, n); /* returns 0 or aborts */
        free(exact);
    }
    free(p);
    return 0;
}
