// A card that is not there: what the files of the stub share. Device memory is host memory, kernels do nothing.
#pragma once
#include <stddef.h>
#include <stdint.h>

// The kind of card that CARD names (A100, H100, H200, B200); CARD_DEVICES says how many of it there are, and CARD_GIB
// how much memory each has, where that is not the memory of its kind.
typedef struct {
  const char *name;
  const char *full_name;
  int capability;
  int processors;
  int shared_memory_of_block;
  int l2_bytes;
  double gib;
} Card;
const Card *card(void);
int card_count(void);
size_t card_memory(void);

// Device calls that are recorded between card_log_start and card_log_stop.
typedef enum { KERNEL, COPY, FILL, WAIT, ALLOCATION, FREE, MESSAGE, MARK, GRAPH } Kind;
void card_note(Kind kind, const char *name, const void *stream, uint64_t size);
void card_note_in(const void *group, Kind kind, const char *name, const void *stream, uint64_t size);

// Values. card_inside is above 0 in a thread whose operator gets its values from the CPU; copies and fills are left out
// there.
extern __thread int card_inside;
// 0: the process computes nothing (card_values).
extern int card_computes;
// A kernel, by its name. Ends the process if no operator gives its values. Returns 0, success in every
// library.
int card_kernel(const char *name, const void *stream);
void card_end(const char *what, const char *name) __attribute__((noreturn));
// Keep an error of the runtime for cudaGetLastError. Returns it.
int card_failed(int error);
// Return an array with room for another element: for the next power of 2.
void *card_with_room(void *array, size_t count, size_t bytes);

// Streams. A task runs at once, unless earlier tasks of its stream wait: for messages of other ranks, or for an event.
// Then it is queued, and a thread of the stub runs it in its turn. In an order (card_order) all tasks are queued.
// `step` returns 1 when the task is over, 0 to be called again; it frees the task, of so many bytes from malloc.
typedef int (*Step)(void *task);
void card_queue(const void *stream, Step step, void *task, size_t bytes);
void card_wait_for_stream(const void *stream);
void card_wait_for_all(void);
int card_has_order(void);

// Graphs. A task in a captured stream is kept for launches (card_captured), and a device call is only counted.
int card_is_captured(const void *stream);
int card_captured(const void *stream, Step step, void *task, size_t bytes);
int card_captured_call(const void *stream);
// Give the calls of NCCL in a task of a graph their numbers, at a launch.
void card_number_calls(Step step, void *task);
// What a capture does not permit: in its stream, or in a thread (memory, waits for the whole device). Returns an error
// or 0.
int card_refused(const void *stream);
int card_refused_here(void);
// Where a captured stream is when it records an event; NULL: it is not captured.
struct Point *card_point(const void *stream);
void card_drop(struct Point *point);
// Let a stream wait for a point, or for an event that is not captured (NULL). Returns an error or 0.
int card_follow(const void *stream, const struct Point *point);
