// Streams and events. Work that has values runs when the host posts it, in the order of the posts. Messages between
// ranks wait for peers, so they stay in their stream's queue, and all that is posted to the stream after them; a thread
// works the queues off. The host waits where it needs what is queued: at an operator in that stream, at a
// synchronization, before memory is unmapped.
//
// In an order (card_order) nothing runs when it is posted. The thread works while the host waits, or posts nothing for
// a while. Of the streams that can go on, it takes the one with the highest turn. Before it takes another than the
// highest of all, it lets the host post.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cuda_runtime_api.h>
#include "card.h"

typedef struct Task {
  Step step;
  void *what;
  struct Task *next;
} Task;

// Tasks of a stream have numbers: of the last that was posted, the last that is over, the last that the host needs.
typedef struct Stream {
  int priority, is_tried;
  const void *name;
  Task *first, *last;
  uint64_t posted, over, needed, turn;
  struct Stream *next;
} Stream;

typedef enum { AT_ONCE, LATE, EARLY, DRAWN } Order;
enum { TASKS_OF_A_TURN = 16, QUERIES_OF_A_NEED = 64, IDLE_MILLISECONDS = 300, QUIET_MILLISECONDS = 20 };

static pthread_mutex_t LOCK = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t CHANGED = PTHREAD_COND_INITIALIZER;
static Stream *STREAMS;
static int QUEUED;
static pid_t WORKS_FOR;
static Order ORDER;
static uint64_t SEED, POSTED_AT;

static uint64_t milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

static uint64_t draw(void) {
  SEED ^= SEED << 13;
  SEED ^= SEED >> 7;
  SEED ^= SEED << 17;
  return SEED;
}

// Turns are drawn. Late: other streams come after the default one, in which the engine computes. Early: before it.
static uint64_t new_turn(const Stream *stream) {
  int is_default = (uintptr_t)stream->name <= 2;
  if (ORDER == DRAWN || !is_default) return draw();
  return ORDER == LATE ? UINT64_MAX : 0;
}

// The default streams are the numbers 0 to 2, not pointers; they get a queue when they need one.
static Stream *stream_of(const void *name) {
  pthread_mutex_lock(&LOCK);
  Stream *found = STREAMS;
  while (found && found->name != name) found = found->next;
  if (!found) {
    found = calloc(1, sizeof *found);
    found->name = name;
    found->turn = new_turn(found);
    found->next = STREAMS;
    STREAMS = found;
  }
  pthread_mutex_unlock(&LOCK);
  return found;
}

static int is_over(const Stream *stream, uint64_t number) {
  return __atomic_load_n(&stream->over, __ATOMIC_ACQUIRE) >= number;
}

static int is_quiet(uint64_t for_milliseconds) {
  return ORDER == AT_ONCE || milliseconds() - POSTED_AT > for_milliseconds;
}

static int is_working(void) {
  if (is_quiet(IDLE_MILLISECONDS)) return 1;
  for (Stream *each = STREAMS; each; each = each->next)
    if (each->over < each->needed) return 1;
  return 0;
}

static Stream *next_stream(void) {
  Stream *found = NULL, *highest = STREAMS;
  for (Stream *each = STREAMS; each; each = each->next) {
    if (each->turn > highest->turn) highest = each;
    if (each->first && !each->is_tried && (!found || each->turn > found->turn)) found = each;
  }
  return !found || found->turn == highest->turn || is_quiet(QUIET_MILLISECONDS) ? found : NULL;
}

static void pop(Stream *stream) {
  Task *task = stream->first;
  stream->first = task->next;
  if (!stream->first) stream->last = NULL;
  free(task);
  QUEUED--;
  __atomic_store_n(&stream->over, stream->over + 1, __ATOMIC_RELEASE);
  int changes = ORDER == DRAWN && draw() % TASKS_OF_A_TURN == 0;
  for (Stream *each = STREAMS; each; each = each->next) {
    each->is_tried = 0;
    if (changes && draw() % 2) each->turn = new_turn(each);
  }
  pthread_cond_broadcast(&CHANGED);
}

static void rest(int microseconds) {
  pthread_mutex_unlock(&LOCK);
  usleep(microseconds);
  pthread_mutex_lock(&LOCK);
}

static void *work(void *unused) {
  pthread_mutex_lock(&LOCK);
  for (;;) {
    while (!QUEUED) pthread_cond_wait(&CHANGED, &LOCK);
    Stream *stream = is_working() ? next_stream() : NULL;
    if (!stream) {
      for (Stream *each = STREAMS; each; each = each->next) each->is_tried = 0;
      rest(50);
      continue;
    }
    // The task stays first while it runs, so that later posts queue behind it.
    Task *task = stream->first;
    pthread_mutex_unlock(&LOCK);
    stream->is_tried = !task->step(task->what);
    pthread_mutex_lock(&LOCK);
    if (!stream->is_tried) pop(stream);
  }
  return NULL;
}

// Returns the number of the task.
static uint64_t put(Stream *stream, Step step, void *what) {
  pthread_mutex_lock(&LOCK);
  int runs = ORDER == AT_ONCE && !stream->first;
  pthread_mutex_unlock(&LOCK);
  // Only the host that posts to a stream could queue something meanwhile.
  runs = runs && step(what);
  pthread_mutex_lock(&LOCK);
  uint64_t number = ++stream->posted;
  if (runs) {
    stream->over++;
    pthread_mutex_unlock(&LOCK);
    return number;
  }
  Task *task = calloc(1, sizeof *task);
  task->step = step;
  task->what = what;
  if (stream->last)
    stream->last->next = task;
  else
    stream->first = task;
  stream->last = task;
  QUEUED++;
  POSTED_AT = milliseconds();
  if (WORKS_FOR != getpid()) {
    pthread_t thread;
    WORKS_FOR = getpid();
    pthread_create(&thread, NULL, work, NULL);
  }
  pthread_cond_broadcast(&CHANGED);
  pthread_mutex_unlock(&LOCK);
  return number;
}

void card_queue(const void *name, Step step, void *what, size_t bytes) {
  if (card_captured(name, step, what, bytes)) return;
  put(stream_of(name), step, what);
}

static void need(Stream *stream, uint64_t number) {
  pthread_mutex_lock(&LOCK);
  if (stream->needed < number) stream->needed = number;
  pthread_mutex_unlock(&LOCK);
}

// Wait without Python's lock: the values of operators need it.
static void wait_for(Stream *stream, uint64_t number) {
  if (is_over(stream, number)) return;
  int (*has_lock)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Check");
  void *(*leave)(void) = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  void (*enter)(void *) = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  void *python = has_lock && has_lock() ? leave() : NULL;
  need(stream, number);
  pthread_mutex_lock(&LOCK);
  while (stream->over < number) pthread_cond_wait(&CHANGED, &LOCK);
  pthread_mutex_unlock(&LOCK);
  if (python) enter(python);
}

void card_wait_for_stream(const void *name) {
  Stream *stream = stream_of(name);
  wait_for(stream, stream->posted);
}

void card_wait_for_all(void) {
  for (Stream *each = STREAMS; each; each = each->next) wait_for(each, each->posted);
}

// Execute what is posted later in an order: "late", "early", a seed, or "" for none.
void card_order(const char *order) {
  card_wait_for_all();
  pthread_mutex_lock(&LOCK);
  ORDER = !*order ? AT_ONCE : !strcmp(order, "late") ? LATE : !strcmp(order, "early") ? EARLY : DRAWN;
  SEED = (strtoull(order, NULL, 10) + 1) * 0x9E3779B97F4A7C15ull;
  for (Stream *each = STREAMS; each; each = each->next) each->turn = new_turn(each);
  pthread_mutex_unlock(&LOCK);
}

int card_has_order(void) {
  return ORDER != AT_ONCE;
}

cudaError_t cudaDeviceSynchronize(void) {
  if (card_refused_here()) return cudaErrorStreamCaptureUnsupported;
  card_note(WAIT, "cudaDeviceSynchronize", NULL, 0);
  card_wait_for_all();
  return 0;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  Stream *made = stream_of(calloc(1, 1));
  made->priority = priority;
  *stream = (cudaStream_t)made->name;
  return 0;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (card_refused(stream)) return cudaErrorStreamCaptureUnsupported;
  Stream *asked = stream_of(stream);
  return is_over(asked, asked->posted) ? 0 : card_failed(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (card_refused(stream)) return cudaErrorStreamCaptureUnsupported;
  card_note(WAIT, "cudaStreamSynchronize", stream, 0);
  card_wait_for_stream(stream);
  return 0;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = stream_of(stream)->priority;
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
  card_queue(stream, call, task, sizeof *task);
  return 0;
}

// ---- events. An event is a task's number in its stream; its time is that of its last record.
typedef struct {
  Stream *stream;
  uint64_t number;
  struct timespec at;
  int users, queries;
  struct Point *point;
} Event;

typedef struct {
  Stream *stream;
  uint64_t number;
} Mark;

static int has_happened(const Event *event) {
  return !event->stream || is_over(event->stream, event->number);
}

// Who uses an event keeps it.
static void leave(Event *event) {
  if (__atomic_sub_fetch(&event->users, 1, __ATOMIC_ACQ_REL)) return;
  card_drop(event->point);
  free(event);
}

static int record(void *task) {
  clock_gettime(CLOCK_MONOTONIC, &((Event *)task)->at);
  leave(task);
  return 1;
}

static int passed(void *task) {
  Mark *mark = task;
  if (!is_over(mark->stream, mark->number)) return 0;
  free(mark);
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
  Event *it = (Event *)event;
  card_drop(it->point);
  it->point = card_point(stream);
  if (it->point) return 0;
  __atomic_add_fetch(&it->users, 1, __ATOMIC_ACQ_REL);
  it->stream = stream_of(stream);
  it->number = put(it->stream, record, it);
  it->queries = 0;
  return 0;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  Event *it = (Event *)event;
  if (it->point || (it->stream && card_is_captured(stream))) return card_follow(stream, it->point);
  if (has_happened(it)) return 0;
  Mark *mark = malloc(sizeof *mark);
  *mark = (Mark){it->stream, it->number};
  card_queue(stream, passed, mark, sizeof *mark);
  return 0;
}

// Torch's allocator asks with its lock held, so a query does not wait. Who asks again and again is given what it needs.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Event *it = (Event *)event;
  if (it->point) return card_failed(cudaErrorCapturedEvent);
  if (card_refused_here()) return cudaErrorStreamCaptureUnsupported;
  if (has_happened(it)) return 0;
  if (++it->queries >= QUERIES_OF_A_NEED) need(it->stream, it->number);
  return card_failed(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  card_note(WAIT, "cudaEventSynchronize", NULL, 0);
  Event *it = (Event *)event;
  if (it->point) return card_failed(cudaErrorCapturedEvent);
  if (it->stream) wait_for(it->stream, it->number);
  return 0;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  struct timespec *a = &((Event *)from)->at, *b = &((Event *)to)->at;
  double seconds = (b->tv_sec - a->tv_sec) + (b->tv_nsec - a->tv_nsec) * 1e-9;
  *milliseconds = seconds > 1e-6 ? (float)(1e3 * seconds) : 1e-3f;
  return 0;
}
