// The card, the record of device calls, and the end of a process that would go on with wrong values.
#include <execinfo.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "card.h"

static const Card CARDS[] = {
    {"A100", "NVIDIA A100-SXM4-80GB", 80, 108, 166912, 41943040, 79.25},
    {"H100", "NVIDIA H100 80GB HBM3", 90, 132, 232448, 52428800, 79.11},
    {"H200", "NVIDIA H200", 90, 132, 232448, 62914560, 139.81},
    {"B200", "NVIDIA B200", 100, 148, 232448, 132644864, 178.35},
};

const Card *card(void) {
  static const Card *chosen;
  if (chosen) return chosen;
  const char *name = getenv("CARD");
  for (size_t i = 0; i < sizeof CARDS / sizeof *CARDS; i++)
    if (!strcmp(CARDS[i].name, name ? name : "H100")) chosen = &CARDS[i];
  if (!chosen) card_end("no such card", name);
  return chosen;
}

int card_count(void) {
  const char *count = getenv("CARD_DEVICES");
  return count ? atoi(count) : 1;
}

size_t card_memory(void) {
  const char *gib = getenv("CARD_GIB");
  return (size_t)((gib ? atof(gib) : card()->gib) * (1 << 30));
}

void card_end(const char *what, const char *name) {
  void *frames[12];
  fprintf(stderr, "cuda stub: %s: %s\n", what, name ? name : "?");
  backtrace_symbols_fd(frames, backtrace(frames, 12), 2);
  // Python's faulthandler prints the lines of Python that led here.
  abort();
}

void *card_with_room(void *array, size_t count, size_t bytes) {
  int is_full = (count & (count - 1)) == 0;
  return is_full ? realloc(array, (count ? 2 * count : 1) * bytes) : array;
}

// An entry of the record. Names are constants or live as long as the process.
typedef struct {
  Kind kind;
  const char *name;
  const void *stream, *group;
  uint64_t size;
} Entry;

static const char *KINDS[] = {"kernel", "copy", "fill", "wait", "allocation", "free", "message", "mark", "graph"};
static pthread_mutex_t LOCK = PTHREAD_MUTEX_INITIALIZER;
static Entry *LOG;
static size_t LENGTH;
static int ON;
static void (*ON_WAIT)(void);

void card_note_in(const void *group, Kind kind, const char *name, const void *stream, uint64_t size) {
  if (card_captured_call(stream) || !ON) return;
  pthread_mutex_lock(&LOCK);
  LOG = card_with_room(LOG, LENGTH, sizeof(Entry));
  LOG[LENGTH++] = (Entry){kind, name, stream, group, size};
  pthread_mutex_unlock(&LOCK);
  if (ON_WAIT && (kind == WAIT || kind == ALLOCATION)) ON_WAIT();
}

void card_note(Kind kind, const char *name, const void *stream, uint64_t size) {
  card_note_in(NULL, kind, name, stream, size);
}

// Note a name of the caller's, which has to live until the record is written.
void card_mark(const char *name) {
  card_note(MARK, name, NULL, 0);
}

// Call a function after each wait and each allocation that is recorded; it may mark who asked for it.
void card_on_wait(void (*call)(void)) {
  ON_WAIT = call;
}

void card_log_start(void) {
  LENGTH = 0;
  ON = 1;
}

// Write a line "kind name stream size group" per call to a file. Returns 0, or 1 if the file cannot be written.
int card_log_stop(const char *path) {
  ON = 0;
  FILE *file = fopen(path, "w");
  if (!file) return 1;
  for (size_t i = 0; i < LENGTH; i++)
    fprintf(file, "%s\t%s\t%lu\t%lu\t%lu\n", KINDS[LOG[i].kind], LOG[i].name, (uintptr_t)LOG[i].stream, LOG[i].size,
            (uintptr_t)LOG[i].group);
  return fclose(file) != 0;
}

__thread int card_inside;
int card_computes = 1;

// Without values, kernels need none, copies and messages move nothing, and a communicator needs no other members.
void card_values(int are_on) {
  card_computes = are_on;
}

void card_enter(void) {
  card_inside++;
}
void card_leave(void) {
  card_inside--;
}

int card_kernel(const char *name, const void *stream) {
  if (!card_inside && card_computes) card_end("a kernel outside of an operator that gives its values", name);
  card_note(KERNEL, name, stream, 0);
  return 0;
}
