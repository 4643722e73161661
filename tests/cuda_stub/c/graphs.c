// Graphs. What is posted to a captured stream becomes a node, in the order of the posts; a launch posts copies of all
// nodes to one stream, in that order. What CUDA refuses during a capture is refused, and ends the capture as invalid.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <cuda_runtime_api.h>
#include "card.h"

enum { STREAMS = 16 };

typedef struct {
  Step step;
  void *what;
  size_t bytes;
} Node;

// `posted` numbers the posts of all streams. A stream has seen another up to a number: it comes after these posts.
typedef struct Capture {
  const void *streams[STREAMS];
  int count, mode, error, is_over, calls, users;
  uint64_t number, posted, last[STREAMS], seen[STREAMS][STREAMS];
  pthread_t owner;
  Node *nodes;
  size_t length;
  struct Capture *next;
} Capture;

struct Point {
  Capture *capture;
  uint64_t seen[STREAMS];
};

static pthread_mutex_t LOCK = PTHREAD_MUTEX_INITIALIZER;
static Capture *ACTIVE;
static uint64_t BEGUN;
static __thread int MODE = cudaStreamCaptureModeGlobal;

static Capture *capture_of(const void *stream, int *place) {
  if (!ACTIVE) return NULL;
  pthread_mutex_lock(&LOCK);
  Capture *found = ACTIVE;
  for (; found; found = found->next) {
    for (*place = 0; *place < found->count; (*place)++)
      if (found->streams[*place] == stream) break;
    if (*place < found->count) break;
  }
  pthread_mutex_unlock(&LOCK);
  return found;
}

int card_is_captured(const void *stream) {
  int place;
  return capture_of(stream, &place) != NULL;
}

int card_refused(const void *stream) {
  int place;
  Capture *capture = capture_of(stream, &place);
  if (!capture) return 0;
  capture->error = cudaErrorStreamCaptureInvalidated;
  return card_failed(cudaErrorStreamCaptureUnsupported);
}

// The rules of cudaThreadExchangeStreamCaptureMode.
int card_refused_here(void) {
  if (!ACTIVE || MODE == cudaStreamCaptureModeRelaxed) return 0;
  pthread_mutex_lock(&LOCK);
  Capture *found = ACTIVE;
  for (; found; found = found->next) {
    int is_mine = pthread_equal(found->owner, pthread_self()) && found->mode != cudaStreamCaptureModeRelaxed;
    if (is_mine || (MODE == cudaStreamCaptureModeGlobal && found->mode == cudaStreamCaptureModeGlobal)) break;
  }
  pthread_mutex_unlock(&LOCK);
  if (!found) return 0;
  found->error = cudaErrorStreamCaptureInvalidated;
  return card_failed(cudaErrorStreamCaptureUnsupported);
}

static void count_post(Capture *capture, int place) {
  capture->last[place] = capture->seen[place][place] = ++capture->posted;
}

int card_captured_call(const void *stream) {
  int place;
  Capture *capture = capture_of(stream, &place);
  if (!capture) return 0;
  capture->calls++;
  count_post(capture, place);
  return 1;
}

int card_captured(const void *stream, Step step, void *what, size_t bytes) {
  int place;
  Capture *capture = capture_of(stream, &place);
  if (!capture) return 0;
  capture->nodes = card_with_room(capture->nodes, capture->length, sizeof(Node));
  capture->nodes[capture->length++] = (Node){step, what, bytes};
  count_post(capture, place);
  return 1;
}

// ---- events: a captured record is a point in the order of the posts, and a wait for it brings a stream in
struct Point *card_point(const void *stream) {
  int place;
  Capture *capture = capture_of(stream, &place);
  if (!capture) return NULL;
  struct Point *point = calloc(1, sizeof *point);
  point->capture = capture;
  capture->users++;
  memcpy(point->seen, capture->seen[place], sizeof point->seen);
  return point;
}

static void leave(Capture *capture) {
  if (--capture->users) return;
  for (size_t i = 0; i < capture->length; i++) free(capture->nodes[i].what);
  free(capture->nodes);
  free(capture);
}

void card_drop(struct Point *point) {
  if (point) leave(point->capture);
  free(point);
}

int card_follow(const void *stream, const struct Point *point) {
  int place;
  Capture *capture = capture_of(stream, &place);
  if (!point) {
    if (capture) capture->error = cudaErrorStreamCaptureInvalidated;
    return card_failed(cudaErrorStreamCaptureIsolation);
  }
  if (point->capture->is_over) return card_failed(cudaErrorCapturedEvent);
  if (!capture) {
    capture = point->capture;
    place = capture->count;
    if (place == STREAMS) card_end("more streams than a graph of the stub takes", "cudaStreamWaitEvent");
    capture->streams[place] = stream;
    capture->count++;
  }
  for (int i = 0; i < STREAMS; i++)
    if (capture->seen[place][i] < point->seen[i]) capture->seen[place][i] = point->seen[i];
  return 0;
}

// ---- the runtime's
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  int before = MODE;
  MODE = *mode;
  *mode = before;
  return 0;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  int place;
  Capture *capture = capture_of(stream, &place);
  *status = !capture         ? cudaStreamCaptureStatusNone
            : capture->error ? cudaStreamCaptureStatusInvalidated
                             : cudaStreamCaptureStatusActive;
  return 0;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *number, cudaGraph_t *graph, const cudaGraphNode_t **before,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  int place;
  Capture *capture = capture_of(stream, &place);
  if (number && capture) *number = capture->number;
  // Nodes have no names here.
  if (graph) *graph = (cudaGraph_t)capture;
  if (before) *before = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  // The default stream cannot be captured.
  if ((uintptr_t)stream <= 2 || card_is_captured(stream)) return card_failed(cudaErrorStreamCaptureUnsupported);
  Capture *made = calloc(1, sizeof *made);
  made->streams[0] = stream;
  made->count = made->users = 1;
  made->mode = mode;
  made->number = ++BEGUN;
  made->owner = pthread_self();
  pthread_mutex_lock(&LOCK);
  made->next = ACTIVE;
  ACTIVE = made;
  pthread_mutex_unlock(&LOCK);
  return 0;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  int place;
  Capture *capture = capture_of(stream, &place);
  *graph = NULL;
  if (!capture || place) return card_failed(cudaErrorIllegalState);
  // What other streams were given comes before the end, in the stream of the begin.
  for (int i = 1; i < capture->count; i++)
    if (!capture->error && capture->seen[0][i] < capture->last[i]) capture->error = cudaErrorStreamCaptureUnjoined;
  pthread_mutex_lock(&LOCK);
  Capture **link = &ACTIVE;
  while (*link != capture) link = &(*link)->next;
  *link = capture->next;
  pthread_mutex_unlock(&LOCK);
  capture->is_over = 1;
  int error = capture->error;
  if (error)
    leave(capture);
  else
    *graph = (cudaGraph_t)capture;
  return error ? card_failed(error) : 0;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = ((Capture *)graph)->calls;
  return 0;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
  ((Capture *)graph)->users++;
  *made = (cudaGraphExec_t)graph;
  return 0;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  Capture *it = (Capture *)graph;
  if (card_is_captured(stream)) card_end("not implemented", "a graph in a graph");
  card_note(GRAPH, "graph", stream, it->calls);
  for (size_t i = 0; i < it->length; i++) {
    void *what = malloc(it->nodes[i].bytes);
    memcpy(what, it->nodes[i].what, it->nodes[i].bytes);
    card_number_calls(it->nodes[i].step, what);
    card_queue(stream, it->nodes[i].step, what, it->nodes[i].bytes);
  }
  return 0;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  leave((Capture *)graph);
  return 0;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  leave((Capture *)graph);
  return 0;
}
