// Streams and events. Work that has values runs when the host posts it, in the order of the posts. Messages between
// ranks wait for peers, so they stay in their stream's queue, and all that is posted to the stream after them; a thread
// works the queues off. The host waits where it needs what is queued: at an operator in that stream, at a
// synchronization, before memory is unmapped.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "card.h"

typedef struct Task {
  Step step;
  void *what;
  struct Task *next;
} Task;

typedef struct Stream {
  int priority;
  const void *name;
  Task *first, *last;
  struct Stream *next;
} Stream;

static pthread_mutex_t LOCK = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t CHANGED = PTHREAD_COND_INITIALIZER;
static Stream *STREAMS;
static int QUEUED;
static pid_t WORKS_FOR;

// The default streams are the numbers 0 to 2, not pointers; they get a queue when they need one.
static Stream *stream_of(const void *name) {
  for (Stream *each = STREAMS; each; each = each->next)
    if (each->name == name) return each;
  Stream *made = calloc(1, sizeof *made);
  made->name = name;
  made->next = STREAMS;
  STREAMS = made;
  return made;
}

static void *work(void *unused) {
  pthread_mutex_lock(&LOCK);
  for (;;) {
    while (!QUEUED) pthread_cond_wait(&CHANGED, &LOCK);
    int moved = 0;
    for (Stream *each = STREAMS; each; each = each->next) {
      Task *task = each->first;
      if (!task) continue;
      // The task stays first while it runs, so that later posts queue behind it.
      pthread_mutex_unlock(&LOCK);
      int is_over = task->step(task->what);
      pthread_mutex_lock(&LOCK);
      if (!is_over) continue;
      each->first = task->next;
      if (!each->first) each->last = NULL;
      free(task);
      QUEUED--;
      moved = 1;
      pthread_cond_broadcast(&CHANGED);
    }
    if (moved) continue;
    pthread_mutex_unlock(&LOCK);
    usleep(50);
    pthread_mutex_lock(&LOCK);
  }
  return NULL;
}

void card_queue(const void *name, Step step, void *what) {
  pthread_mutex_lock(&LOCK);
  Stream *stream = stream_of(name);
  int is_free = !stream->first;
  pthread_mutex_unlock(&LOCK);
  // Only the host that posts to a stream could queue something meanwhile.
  if (is_free && step(what)) return;
  Task *task = calloc(1, sizeof *task);
  task->step = step;
  task->what = what;
  pthread_mutex_lock(&LOCK);
  if (stream->last)
    stream->last->next = task;
  else
    stream->first = task;
  stream->last = task;
  QUEUED++;
  if (WORKS_FOR != getpid()) {
    pthread_t thread;
    WORKS_FOR = getpid();
    pthread_create(&thread, NULL, work, NULL);
  }
  pthread_cond_broadcast(&CHANGED);
  pthread_mutex_unlock(&LOCK);
}

void card_wait_for_stream(const void *name) {
  pthread_mutex_lock(&LOCK);
  Stream *stream = stream_of(name);
  while (stream->first) pthread_cond_wait(&CHANGED, &LOCK);
  pthread_mutex_unlock(&LOCK);
}

void card_wait_for_all(void) {
  pthread_mutex_lock(&LOCK);
  while (QUEUED) pthread_cond_wait(&CHANGED, &LOCK);
  pthread_mutex_unlock(&LOCK);
}

static int is_busy(const void *name) {
  pthread_mutex_lock(&LOCK);
  int found = stream_of(name)->first != NULL;
  pthread_mutex_unlock(&LOCK);
  return found;
}

extern cudaError_t card_failed(cudaError_t error);

cudaError_t cudaDeviceSynchronize(void) {
  card_note(WAIT, "cudaDeviceSynchronize", NULL, 0);
  card_wait_for_all();
  return 0;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  Stream *made = calloc(1, sizeof *made);
  made->priority = priority;
  made->name = made;
  pthread_mutex_lock(&LOCK);
  made->next = STREAMS;
  STREAMS = made;
  pthread_mutex_unlock(&LOCK);
  *stream = (cudaStream_t)made;
  return 0;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return 0;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return is_busy(stream) ? card_failed(cudaErrorNotReady) : 0;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  card_note(WAIT, "cudaStreamSynchronize", stream, 0);
  card_wait_for_stream(stream);
  return 0;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = (uintptr_t)stream > 2 ? ((Stream *)stream)->priority : 0;
  return 0;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return 0;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return 0;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  return 0;
}

typedef struct {
  cudaHostFn_t function;
  void *argument;
} Call;

static int call(void *task) {
  Call *it = task;
  it->function(it->argument);
  free(it);
  return 1;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
  Call *task = malloc(sizeof *task);
  *task = (Call){function, argument};
  card_queue(stream, call, task);
  return 0;
}

// ---- events. An event is over when its last record has run; who uses it keeps it.
typedef struct {
  uint64_t recorded, over;
  struct timespec at;
  int users;
} Event;

typedef struct {
  Event *event;
  uint64_t number;
} Mark;

static void leave(Event *event) {
  if (__atomic_sub_fetch(&event->users, 1, __ATOMIC_ACQ_REL) == 0) free(event);
}

static Mark *mark(Event *event) {
  Mark *made = malloc(sizeof *made);
  *made = (Mark){event, event->recorded};
  __atomic_add_fetch(&event->users, 1, __ATOMIC_ACQ_REL);
  return made;
}

static int is_over(const Event *event, uint64_t number) {
  return __atomic_load_n(&event->over, __ATOMIC_ACQUIRE) >= number;
}

static int record(void *task) {
  Mark *it = task;
  clock_gettime(CLOCK_MONOTONIC, &it->event->at);
  __atomic_store_n(&it->event->over, it->number, __ATOMIC_RELEASE);
  leave(it->event);
  free(it);
  return 1;
}

static int passed(void *task) {
  Mark *it = task;
  if (!is_over(it->event, it->number)) return 0;
  leave(it->event);
  free(it);
  return 1;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  Event *made = calloc(1, sizeof *made);
  made->users = 1;
  *event = (cudaEvent_t)made;
  return 0;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  leave((Event *)event);
  return 0;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  ((Event *)event)->recorded++;
  card_queue(stream, record, mark((Event *)event));
  return 0;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  card_queue(stream, passed, mark((Event *)event));
  return 0;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return is_over((Event *)event, ((Event *)event)->recorded) ? 0 : card_failed(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  card_note(WAIT, "cudaEventSynchronize", NULL, 0);
  while (!is_over((Event *)event, ((Event *)event)->recorded)) usleep(20);
  return 0;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  struct timespec *a = &((Event *)from)->at, *b = &((Event *)to)->at;
  double seconds = (b->tv_sec - a->tv_sec) + (b->tv_nsec - a->tv_nsec) * 1e-9;
  *milliseconds = seconds > 1e-6 ? (float)(1e3 * seconds) : 1e-3f;
  return 0;
}
