/*
 * Fuzz target: the head of a request as bytes, and chunks behind it. What is refused is never whole when more has come, what is whole
 * waits for nothing, and every refusal has a status, a code and a sentence.
 */
#include "server/head.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

#define N_BYTES_MAX 256

static void require(bool is_true)
{
    if (!is_true)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    enum head_state before = HEAD_PARTIAL;

    for (size_t k = 0; k <= n; k++) {
        struct head_refusal why = {0};
        char *exact = malloc(k ? k : 1); /* a read beyond what has come is seen by the sanitizer */
        enum head_state state;

        require(exact != NULL);
        memcpy(exact, p, k);
        state = head_scan(exact, k, N_BYTES_MAX, &why);
        free(exact);
        require(before != HEAD_REFUSED || state == HEAD_REFUSED);
        require(before != HEAD_WHOLE || state != HEAD_PARTIAL); /* chunks that came may be bad */
        require(state != HEAD_PARTIAL || k < head_scan_max(N_BYTES_MAX));
        require((state == HEAD_REFUSED) == (why.status >= 400 && why.code[0] && why.text[0]));
        before = state;
    }
    return 0;
}
