// NCCL between processes of one machine. A communicator is a file in TMPDIR, named by its unique id, that all members
// map: a header, and for each member a file of its own with what it sends. Calls of a communicator match by their
// order.
//
//   a collective    wait until all members have finished the last one; put my part into my file; when all have put
//                   theirs, compare the calls, read, reduce, and finish
//   send, receive   the same between two members
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include "card.h"

// Numbers are those of nccl.h.
typedef enum { SUM, PROD, MAX, MIN, AVG } Reduction;
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum { SUCCESS, IN_PROGRESS = 7 };
static const int WIDTHS[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const char *TYPES[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64",
                              "fp16", "fp32",  "fp64",  "bf16",   "e4m3",  "e5m2"};

typedef enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, REDUCE, SEND, RECEIVE } Verb;
static const char *VERBS[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                              "broadcast",  "reduce",     "send",           "receive"};

enum { MOST = 16 };

// What a member says of its call; `posted` and `finished` count calls.
typedef struct {
  Verb verb;
  int type, reduction, root;
  size_t count;
  uint64_t posted, finished;
} Post;

typedef struct {
  int joined;
  Post members[MOST];
  Post sent[MOST][MOST];
} Header;

typedef struct {
  char *data;
  size_t bytes;
  int file;
} Area;

// Areas: of each member in collectives, and of each pair for messages between two.
typedef struct ncclComm {
  int rank, size, is_aborted;
  uint64_t calls;
  char name[128], group[128];
  Header *header;
  Area members[MOST], sent[MOST][MOST];
} Comm;

typedef struct {
  Verb verb;
  int type, reduction, peer;
  const char *from;
  char *to;
  size_t count;
  Comm *comm;
  int phase;
  uint64_t number;
} Call;

typedef struct {
  int count;
  Call calls[];
} Group;

static uint64_t load(uint64_t *number) {
  return __atomic_load_n(number, __ATOMIC_ACQUIRE);
}
static void store(uint64_t *number, uint64_t value) {
  __atomic_store_n(number, value, __ATOMIC_RELEASE);
}

// ---- memory that members share
typedef char Path[256];

static int open_shared(Path path, const char *name, const char *part) {
  const char *folder = getenv("TMPDIR");
  snprintf(path, sizeof(Path), "%s/cuda-stub-%s%s", folder ? folder : "/tmp", name, part);
  int file = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) card_end("cannot open", path);
  return file;
}

// Map at least so many bytes of an area, which its owner makes as large as that.
static char *area(Area *of, size_t bytes, int is_mine) {
  if (bytes <= of->bytes) return of->data;
  size_t whole = (2 * bytes + 4095) & ~(size_t)4095;
  struct stat now;
  fstat(of->file, &now);
  if (is_mine && (size_t)now.st_size < whole && ftruncate(of->file, whole))
    card_end("no room for messages", "ftruncate");
  if (!is_mine) whole = now.st_size;
  if (of->data) munmap(of->data, of->bytes);
  of->data = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, of->file, 0);
  of->bytes = whole;
  return of->data;
}

// ---- sums
static float of_bfloat(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static uint16_t to_bfloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#define COMBINE(a, b) \
  (how == MAX ? ((a) > (b) ? (a) : (b)) : how == MIN ? ((a) < (b) ? (a) : (b)) : how == PROD ? (a) * (b) : (a) + (b))

// dtype, its C type, the type of the sum, and the conversions. A ring rounds to the dtype at each hop.
#define TYPES_OF_SUMS(DO)            \
  DO(INT8, int8_t, int8_t, , )       \
  DO(UINT8, uint8_t, uint8_t, , )    \
  DO(INT32, int32_t, int32_t, , )    \
  DO(UINT32, uint32_t, uint32_t, , ) \
  DO(INT64, int64_t, int64_t, , )    \
  DO(UINT64, uint64_t, uint64_t, , ) \
  DO(FLOAT32, float, float, , )      \
  DO(FLOAT64, double, double, , )    \
  DO(FLOAT16, _Float16, float, , )   \
  DO(BFLOAT16, uint16_t, float, of_bfloat, to_bfloat)

// Add `more` to `sum`, in place; at the last hop of an average, divide.
static void add(char *sum, const char *more, size_t count, int type, Reduction how, int divisor) {
#define ADD(which, stored, wide, from, to)                              \
  if (type == which)                                                    \
    for (size_t i = 0; i < count; i++) {                                \
      wide a = from(((stored *)sum)[i]), b = from(((stored *)more)[i]); \
      wide c = COMBINE(a, b);                                           \
      ((stored *)sum)[i] = to((wide)(divisor > 1 ? c / divisor : c));   \
    }
  TYPES_OF_SUMS(ADD)
  if (how > AVG) card_end("a sum of products without its factor in this stub", TYPES[type]);
  if (type >= FLOAT8_E4M3) card_end("NCCL has no sums of FP8 in this stub", TYPES[type]);
}

// Reduce `count` elements from `offset` on, as the ring does that ends at a member: it begins at the next one.
static void reduce(Call *call, char *to, size_t offset, size_t count, int last) {
  Comm *comm = call->comm;
  int width = WIDTHS[call->type];
  for (int hop = 1; hop <= comm->size; hop++) {
    int member = (last + hop) % comm->size;
    const char *part = area(&comm->members[member], (offset + count) * width, 0) + offset * width;
    if (hop == 1)
      memcpy(to, part, count * width);
    else
      add(to, part, count, call->type, call->reduction, hop == comm->size && call->reduction == AVG ? comm->size : 1);
  }
}

// ---- calls
static size_t sent_bytes(const Call *call) {
  size_t bytes = call->count * WIDTHS[call->type];
  int is_cut = call->verb == REDUCE_SCATTER || call->verb == ALL_TO_ALL;
  if (call->verb == BROADCAST && call->comm->rank != call->peer) return 0;
  return is_cut ? bytes * call->comm->size : bytes;
}

static void describe(char *text, size_t room, int member, const Post *post) {
  snprintf(text, room, "member %d: %s of %zu x %s, root %d, call %lu", member, VERBS[post->verb], post->count,
           TYPES[post->type], post->root, post->posted);
}

static void refuse(const Comm *comm, int one, const Post *first, int other, const Post *second) {
  char a[160], b[160], both[512];
  describe(a, sizeof a, one, first);
  describe(b, sizeof b, other, second);
  snprintf(both, sizeof both, "%s; %s; in a communicator of %d, %s", a, b, comm->size, comm->group);
  card_end("NCCL calls that do not match", both);
}

static void finish(Call *call) {
  Comm *comm = call->comm;
  size_t bytes = call->count * WIDTHS[call->type];
  for (int member = 0; member < comm->size; member++) {
    Post *post = &comm->header->members[member], *mine = &comm->header->members[comm->rank];
    if (post->verb != mine->verb || post->type != mine->type || post->count != mine->count ||
        post->reduction != mine->reduction || post->root != mine->root)
      refuse(comm, comm->rank, mine, member, post);
  }
  if (call->verb == ALL_REDUCE || (call->verb == REDUCE && comm->rank == call->peer)) {
    // Each piece goes around the ring, and ends at another member.
    size_t piece = (call->count + comm->size - 1) / comm->size;
    for (int last = 0; last < comm->size && last * piece < call->count; last++) {
      size_t left = call->count - last * piece;
      reduce(call, call->to + last * piece * WIDTHS[call->type], last * piece, left < piece ? left : piece, last);
    }
  } else if (call->verb == REDUCE_SCATTER) {
    reduce(call, call->to, comm->rank * call->count, call->count, comm->rank);
  } else if (call->verb == BROADCAST) {
    memcpy(call->to, area(&comm->members[call->peer], bytes, 0), bytes);
  } else if (call->verb == ALL_GATHER || call->verb == ALL_TO_ALL) {
    for (int member = 0; member < comm->size; member++) {
      size_t at = call->verb == ALL_TO_ALL ? comm->rank * bytes : 0;
      memcpy(call->to + member * bytes, area(&comm->members[member], at + bytes, 0) + at, bytes);
    }
  }
}

static int collective(Call *call) {
  Comm *comm = call->comm;
  Post *mine = &comm->header->members[comm->rank];
  if (call->phase == 0) {
    for (int member = 0; member < comm->size; member++)
      if (load(&comm->header->members[member].finished) < call->number - 1) return 0;
    size_t bytes = sent_bytes(call);
    if (bytes) memcpy(area(&comm->members[comm->rank], bytes, 1), call->from, bytes);
    mine->verb = call->verb;
    mine->type = call->type;
    mine->reduction = call->reduction;
    mine->root = call->peer;
    mine->count = call->count;
    store(&mine->posted, call->number);
    call->phase = 1;
  }
  for (int member = 0; member < comm->size; member++)
    if (load(&comm->header->members[member].posted) < call->number) return 0;
  finish(call);
  store(&mine->finished, call->number);
  return 1;
}

static int send_message(Call *call) {
  Comm *comm = call->comm;
  Post *post = &comm->header->sent[comm->rank][call->peer];
  size_t bytes = call->count * WIDTHS[call->type];
  if (call->phase == 0) {
    if (load(&post->finished) < post->posted) return 0;
    if (bytes) memcpy(area(&comm->sent[comm->rank][call->peer], bytes, 1), call->from, bytes);
    post->verb = SEND;
    post->type = call->type;
    post->count = call->count;
    call->number = post->posted + 1;
    store(&post->posted, call->number);
    call->phase = 1;
  }
  return load(&post->finished) >= call->number;
}

static int receive_message(Call *call) {
  Comm *comm = call->comm;
  Post *post = &comm->header->sent[call->peer][comm->rank];
  if (load(&post->posted) == load(&post->finished)) return 0;
  Post mine = {RECEIVE, call->type, 0, 0, call->count, post->posted, 0};
  if (post->type != call->type || post->count != call->count) refuse(comm, call->peer, post, comm->rank, &mine);
  size_t bytes = call->count * WIDTHS[call->type];
  if (bytes) memcpy(call->to, area(&comm->sent[call->peer][comm->rank], bytes, 0), bytes);
  store(&post->finished, post->posted);
  return 1;
}

enum { OVER = 2 };

// A group is over when all of its calls are; none waits for another, but for those of its own pair or communicator.
static int step(void *task) {
  Group *group = task;
  int left = 0;
  for (int i = 0; i < group->count; i++) {
    Call *call = &group->calls[i];
    if (call->phase == OVER) continue;
    int is_first = 1;
    for (int j = 0; j < i; j++) {
      Call *other = &group->calls[j];
      int is_same = other->verb == call->verb && other->peer == call->peer;
      if (other->phase != OVER && other->comm == call->comm && (call->verb < SEND || is_same)) is_first = 0;
    }
    int is_over = call->comm->is_aborted;
    if (!is_over && is_first)
      is_over = call->verb == SEND      ? send_message(call)
                : call->verb == RECEIVE ? receive_message(call)
                                        : collective(call);
    if (is_over) call->phase = OVER;
    left += !is_over;
  }
  if (left) return 0;
  free(group);
  return 1;
}

static __thread int DEPTH;
static __thread Group *OPEN;
static __thread const void *STREAM;

static void number(Call *call) {
  if (call->verb < SEND) call->number = ++call->comm->calls;
}

// Calls of a graph get their numbers when it is launched.
void card_number_calls(Step how, void *task) {
  if (how != step) return;
  Group *group = task;
  for (int i = 0; i < group->count; i++) number(&group->calls[i]);
}

static void put(void) {
  card_queue(STREAM, step, OPEN, sizeof(Group) + OPEN->count * sizeof(Call));
  OPEN = NULL;
}

static int post(Call call, const void *stream) {
  card_note_in(call.comm, MESSAGE, VERBS[call.verb], stream, call.count * WIDTHS[call.type]);
  if (!card_computes) return SUCCESS;
  if (!card_is_captured(stream)) number(&call);
  int count = OPEN ? OPEN->count : 0;
  OPEN = realloc(OPEN, sizeof(Group) + (count + 1) * sizeof(Call));
  OPEN->calls[count] = call;
  OPEN->count = count + 1;
  STREAM = stream;
  if (!DEPTH) put();
  return SUCCESS;
}

int ncclGroupStart(void) {
  DEPTH++;
  return SUCCESS;
}

int ncclGroupEnd(void) {
  DEPTH--;
  if (DEPTH || !OPEN) return SUCCESS;
  put();
  return SUCCESS;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int how, Comm *comm, void *stream) {
  return post((Call){ALL_REDUCE, type, how, 0, from, to, count, comm}, stream);
}

int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
  return post((Call){ALL_GATHER, type, 0, 0, from, to, count, comm}, stream);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int how, Comm *comm, void *stream) {
  return post((Call){REDUCE_SCATTER, type, how, 0, from, to, count, comm}, stream);
}

int ncclAlltoAll(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
  return post((Call){ALL_TO_ALL, type, 0, 0, from, to, count, comm}, stream);
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
  return post((Call){BROADCAST, type, 0, root, from, to, count, comm}, stream);
}

int ncclBcast(void *buffer, size_t count, int type, int root, Comm *comm, void *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

int ncclReduce(const void *from, void *to, size_t count, int type, int how, int root, Comm *comm, void *stream) {
  return post((Call){REDUCE, type, how, root, from, to, count, comm}, stream);
}

int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
  return post((Call){SEND, type, 0, peer, from, NULL, count, comm}, stream);
}

int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
  return post((Call){RECEIVE, type, 0, peer, NULL, to, count, comm}, stream);
}

// ---- communicators
typedef struct {
  char bytes[128];
} UniqueId;

int ncclGetUniqueId(UniqueId *id) {
  return getrandom(id, sizeof *id, 0) == sizeof *id ? SUCCESS : 1;
}

// The begin of ncclConfig_t, NCCL 2.27.
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cluster, fewest, most;
  const char *net;
  int is_split, traffic;
  const char *name;
} Config;

int ncclCommInitRankConfig(Comm **made, int size, UniqueId id, int rank, const Config *config) {
  Comm *comm = *made = calloc(1, sizeof *comm);
  comm->rank = rank;
  comm->size = size;
  if (config && config->size >= sizeof(Config) && config->name)
    snprintf(comm->group, sizeof comm->group, "%s", config->name);
  if (!card_computes) return SUCCESS;
  if (size > MOST) card_end("more ranks than the stub's NCCL takes", "ncclCommInitRank");
  for (int i = 0; i < 16; i++) sprintf(comm->name + 2 * i, "%02x", (unsigned char)id.bytes[i]);
  Path opened[1 + 3 * MOST], *next = opened;
  int file = open_shared(*next++, comm->name, "");
  if (ftruncate(file, sizeof(Header))) card_end("no room for a communicator", comm->name);
  comm->header = mmap(NULL, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  char part[32];
  for (int one = 0; one < size; one++) {
    snprintf(part, sizeof part, ".%d", one);
    comm->members[one].file = open_shared(*next++, comm->name, part);
    for (int other = 0; other < size; other++) {
      if (one != rank && other != rank) continue;
      snprintf(part, sizeof part, ".%d.%d", one, other);
      comm->sent[one][other].file = open_shared(*next++, comm->name, part);
    }
  }
  __atomic_add_fetch(&comm->header->joined, 1, __ATOMIC_ACQ_REL);
  // All have opened the files: their names can go.
  for (int waited = 0; __atomic_load_n(&comm->header->joined, __ATOMIC_ACQUIRE) < size; waited++) {
    if (waited > 600 * 1000) card_end("a member never joined the communicator", comm->name);
    usleep(1000);
  }
  while (next > opened) unlink(*--next);
  return SUCCESS;
}

int ncclCommInitRank(Comm **made, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, NULL);
}

int ncclCommAbort(Comm *comm) {
  // torch's watchdog aborts some communicators that are gone.
  if (comm) comm->is_aborted = 1;
  return SUCCESS;
}

int ncclCommCount(const Comm *comm, int *size) {
  *size = comm->size;
  return SUCCESS;
}

int ncclCommUserRank(const Comm *comm, int *rank) {
  *rank = comm->rank;
  return SUCCESS;
}

const char *ncclGetErrorString(int error) {
  return error ? "an error of the stub's NCCL" : "no error";
}
