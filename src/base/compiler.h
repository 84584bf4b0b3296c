/*
 * The only place that names compiler extensions. Everything else uses these words, so that a port to another
 * compiler starts and ends here (vector kernels in merge/kernel_* excepted).
 */
#ifndef PF_BASE_COMPILER_H
#define PF_BASE_COMPILER_H

#define PF_PRINTF(i_fmt, i_args) __attribute__((format(printf, i_fmt, i_args)))
#define PF_WARN_UNUSED           __attribute__((warn_unused_result))
#define PF_UNUSED                __attribute__((unused))
/* A thread-local that a signal handler may touch: its storage exists from the start of the thread. */
#define PF_TLS_IN_HANDLER _Thread_local __attribute__((tls_model("initial-exec")))
#define PF_COUNTOF(a)     (sizeof(a) / sizeof((a)[0]))
#define PF_ALWAYS_INLINE  inline __attribute__((always_inline))

/*
 * A function that is compiled for wider vectors too, chosen by the loader. The bits are the same: nothing is contracted or
 * reordered. Not under sanitizers, whose run time is not there yet when the loader chooses.
 */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) &&                             \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PF_WIDER_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PF_WIDER_CLONES
#endif

#endif
