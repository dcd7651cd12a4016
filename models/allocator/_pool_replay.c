/* A whole run through the pools of the caching allocator in one compiled loop.

   Which block is taken, split and merged follows caching_allocator.py, rule by rule; tests compare the two. Sizes and
   addresses are in units of 512 bytes. It is built if there is a compiler, and is not required: without it
   caching_allocator.py does the same, some twenty-five times slower. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* one build serves CPython 3.11 and all after it */
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SMALL = 2048, SMALL_SEGMENT = 4096, MIN_LARGE = 20480, LARGE_ROUND = 4096 }; /* rounding.py, in units */

typedef struct {
    int64_t size, address;
    int32_t previous, next; /* neighbours in the segment; 0: none */
    char cached;
} Block;

typedef struct {
    uint64_t *keys; /* of cached blocks, ascending by size, then address; the end that can still grow has none */
    int32_t *free;  /* the blocks that have these keys */
    Py_ssize_t count, room;
    int64_t end;   /* the next address; if addresses fall, the lowest so far */
    int32_t last;  /* the last block of an expandable segment */
    int small;
} Pool;

typedef struct {
    Block *blocks;
    Py_ssize_t count, room;
    Pool *pools;
    int64_t reserved, peak_reserved, limit, segment;
    Py_ssize_t num_segments;
    int32_t spare; /* list, by `next`, of block numbers to use again, which keeps the heap small enough for the CPU's cache */
    int expandable, falling, failed, beyond; /* `beyond`: sizes or addresses exceed what keys can hold */
} Heap;

enum { ADDRESS_BITS = 34 }; /* 8 TiB of addresses, and blocks of up to 512 GiB */

static uint64_t key(int64_t size, int64_t address)
{
    return (uint64_t)size << ADDRESS_BITS | (uint64_t)address;
}

/* Index of the pool's first free block whose key is at least `wanted`. Without branches, which a CPU could mispredict. */
static Py_ssize_t find(const Pool *pool, uint64_t wanted)
{
    const uint64_t *base = pool->keys;
    Py_ssize_t left = pool->count;
    if (!left)
        return 0;
    while (left > 1) {
        Py_ssize_t half = left / 2;
        base += base[half - 1] < wanted ? half : 0;
        left -= half;
    }
    return base - pool->keys + (*base < wanted);
}

static void take(Pool *pool, Py_ssize_t at)
{
    Py_ssize_t after = --pool->count - at;
    memmove(pool->keys + at, pool->keys + at + 1, after * sizeof(uint64_t));
    memmove(pool->free + at, pool->free + at + 1, after * sizeof(int32_t));
}

static Py_ssize_t place_of(const Heap *heap, const Pool *pool, int32_t number)
{
    return find(pool, key(heap->blocks[number].size, heap->blocks[number].address));
}

/* Make room for one more free block of the pool; returns its index. */
static Py_ssize_t append(Heap *heap, Pool *pool)
{
    if (pool->count == pool->room) {
        Py_ssize_t room = pool->room ? 2 * pool->room : 64;
        uint64_t *keys = realloc(pool->keys, room * sizeof(uint64_t));
        int32_t *larger = realloc(pool->free, room * sizeof(int32_t));
        pool->keys = keys ? keys : pool->keys;
        pool->free = larger ? larger : pool->free;
        if (!keys || !larger) {
            heap->failed = 1;
            return -1;
        }
        pool->room = room;
    }
    pool->keys[pool->count] = UINT64_MAX;
    return pool->count++;
}

/* Insert block `number` by its key, and remove the block at index `from` (-1: none). */
static void put(Heap *heap, Pool *pool, Py_ssize_t from, int32_t number)
{
    const Block *block = &heap->blocks[number];
    uint64_t wanted = key(block->size, block->address);
    Py_ssize_t to;
    if (block->address + block->size >= (int64_t)1 << ADDRESS_BITS) {
        heap->beyond = 1;
        return;
    }
    if (from < 0 && (from = append(heap, pool)) < 0)
        return;
    to = find(pool, wanted);
    if (to <= from) {
        memmove(pool->keys + to + 1, pool->keys + to, (from - to) * sizeof(uint64_t));
        memmove(pool->free + to + 1, pool->free + to, (from - to) * sizeof(int32_t));
    } else {
        to--;
        memmove(pool->keys + from, pool->keys + from + 1, (to - from) * sizeof(uint64_t));
        memmove(pool->free + from, pool->free + from + 1, (to - from) * sizeof(int32_t));
    }
    pool->keys[to] = wanted;
    pool->free[to] = number;
}

static void forget(Heap *heap, int32_t number)
{
    heap->blocks[number].cached = 0;
    heap->blocks[number].next = heap->spare;
    heap->spare = number;
}

/* Make a block with the given neighbours; returns its number. There is room for two per request. */
static int32_t add(Heap *heap, int64_t size, int64_t address, int32_t previous, int32_t next)
{
    int32_t number = heap->spare ? heap->spare : (int32_t)heap->count++;
    Block block = {size, address, previous, next, 0};
    if (heap->spare)
        heap->spare = heap->blocks[number].next;
    heap->blocks[number] = block;
    if (previous)
        heap->blocks[previous].next = number;
    if (next)
        heap->blocks[next].previous = number;
    return number;
}

static int reserve(Heap *heap, Pool *pool, int64_t size)
{
    if (heap->limit >= 0 && heap->reserved + size > heap->limit)
        return 0;
    heap->reserved += size;
    if (heap->reserved > heap->peak_reserved)
        heap->peak_reserved = heap->reserved;
    pool->end += heap->falling ? -size : size;
    heap->beyond |= pool->end < 0;
    return 1;
}

/* A block of at least `size` when no free one is large enough: a new segment, or the end of the expandable one; 0 if the
   limit forbids it. */
static int32_t grow(Heap *heap, Pool *pool, int64_t size)
{
    int64_t address = pool->end, segment, page, have;
    if (!heap->expandable) {
        segment = size <= SMALL       ? SMALL_SEGMENT
                  : size < MIN_LARGE ? heap->segment
                                     : (size + LARGE_ROUND - 1) / LARGE_ROUND * LARGE_ROUND;
        if (!reserve(heap, pool, segment))
            return 0;
        heap->num_segments++;
        return add(heap, segment, heap->falling ? pool->end : address, 0, 0);
    }
    page = pool->small ? SMALL_SEGMENT : heap->segment;
    have = pool->last && heap->blocks[pool->last].cached ? heap->blocks[pool->last].size : 0;
    segment = size > have ? (size - have + page - 1) / page * page : 0;
    if (segment && !reserve(heap, pool, segment))
        return 0;
    if (have) {
        heap->blocks[pool->last].size += segment;
        return pool->last;
    }
    heap->num_segments += !pool->last;
    return pool->last = add(heap, segment, address, pool->last, 0);
}

enum { NOBODY = INT32_MIN }; /* the holder's block was returned to the driver early */

/* Return every completely free segment to the driver. */
static void give_back(Heap *heap, Py_ssize_t num_pools)
{
    for (Pool *pool = heap->pools; pool < heap->pools + num_pools; pool++) {
        Py_ssize_t kept = 0;
        for (Py_ssize_t at = 0; at < pool->count; at++) {
            Block *block = &heap->blocks[pool->free[at]];
            if (block->previous || block->next) {
                pool->keys[kept] = pool->keys[at];
                pool->free[kept++] = pool->free[at];
            } else {
                heap->reserved -= block->size;
                heap->num_segments--;
                forget(heap, pool->free[at]);
            }
        }
        pool->count = kept;
    }
}

/* Allocate a block of at least `size`, from the driver if `fresh`; returns its number, 0 if the limit forbids it. */
static int32_t allocate(Heap *heap, Pool *pool, int64_t size, int fresh)
{
    Py_ssize_t at = -1;
    int64_t rest;
    int32_t number, after;
    if (size >> (64 - ADDRESS_BITS)) {
        heap->beyond = 1;
        return 0;
    }
    if (!fresh && (at = find(pool, key(size, 0))) < pool->count) {
        number = pool->free[at];
    } else {
        at = -1;
        if (!(number = grow(heap, pool, size)))
            return 0;
    }
    heap->blocks[number].cached = 0;
    rest = heap->blocks[number].size - size;
    if (rest >= (pool->small || heap->expandable ? 1 : SMALL + 1)) {
        heap->blocks[number].size = size;
        after = add(heap, rest, heap->blocks[number].address + size, number, heap->blocks[number].next);
        heap->blocks[after].cached = 1;
        if (!heap->expandable || heap->blocks[after].next) {
            put(heap, pool, at, after);
            return number;
        }
        pool->last = after;
    }
    if (at >= 0)
        take(pool, at);
    return number;
}

static void release(Heap *heap, Pool *pool, int32_t number)
{
    Block *block = &heap->blocks[number], *other;
    Py_ssize_t before = -1, after = -1;
    int32_t merged;
    if ((merged = block->next) && (other = &heap->blocks[merged])->cached) {
        if (other->next || !heap->expandable)
            after = place_of(heap, pool, merged);
        block->size += other->size;
        block->next = other->next;
        if (block->next)
            heap->blocks[block->next].previous = number;
        forget(heap, merged);
    }
    if ((merged = block->previous) && (other = &heap->blocks[merged])->cached) {
        before = place_of(heap, pool, merged);
        block->size += other->size;
        block->address = other->address;
        block->previous = other->previous;
        if (block->previous)
            heap->blocks[block->previous].next = number;
        forget(heap, merged);
    }
    if (before >= 0 && after >= 0) {
        take(pool, after);
        before -= after < before;
    }
    block->cached = 1;
    if (before < 0)
        before = after;
    if (block->next || !heap->expandable) {
        put(heap, pool, before, number);
    } else {
        if (before >= 0)
            take(pool, before);
        pool->last = number;
    }
}

PyDoc_STRVAR(replay_doc,
"replay(events, sizes, pools, num_pools, expandable, falling, segment, limit)\n\n"
"Replay `events` (int64: a holder to allocate, its complement to free, the holder and their number to let go of what is\n"
"freed later); `sizes` and `pools` (int64) are by holder, pools of odd number hold small blocks; `falling`: each segment has a lower address than those before; `limit`: units that may be\n"
"reserved, -1 for any. Returns the largest and the last of what is\n"
"allocated and of what is reserved, the segments and the retries; where the limit leaves no room, even after every free\n"
"segment went back, the holder that found none and what is reserved then; None where pages would have to go back, or where\n"
"more is asked for than any GPU has.");

static PyObject *replay(PyObject *module, PyObject *args)
{
    Py_buffer events, sizes, pools;
    Py_ssize_t num_pools, num_events, num_holders, retries = 0, homeless = -1;
    long long segment, limit;
    int64_t allocated = 0, peak = 0;
    int32_t *held = NULL;
    int expandable, falling, answered = 0;
    Heap heap = {0};
    if (!PyArg_ParseTuple(args, "y*y*y*nppLL", &events, &sizes, &pools, &num_pools, &expandable, &falling, &segment,
                          &limit))
        return NULL;
    num_events = events.len / 8;
    num_holders = sizes.len / 8;
    heap.expandable = expandable;
    heap.falling = falling && !expandable; /* within a segment, pages always follow each other */
    heap.segment = segment;
    heap.limit = limit;
    heap.room = 2 * num_events + 1;
    heap.count = 1;
    heap.blocks = malloc(heap.room * sizeof(Block));
    heap.pools = calloc(num_pools, sizeof(Pool));
    held = calloc(num_holders + 1, sizeof(int32_t));
    if (!heap.blocks || !heap.pools || !held || heap.room >= INT32_MAX)
        heap.failed = 1;
    for (Py_ssize_t pool = 0; !heap.failed && pool < num_pools; pool++) {
        heap.pools[pool].small = pool % 2;
        heap.pools[pool].end = heap.falling ? ((int64_t)1 << ADDRESS_BITS) - 1 : 0;
    }
    for (Py_ssize_t at = 0; !heap.failed && !heap.beyond; at++) {
        int64_t event, holder;
        Pool *pool;
        if (at == num_events) {
            answered = 1;
            break;
        }
        event = ((const int64_t *)events.buf)[at];
        holder = event < 0 ? ~event : event >= num_holders ? event - num_holders : event;
        if (holder >= num_holders || ((const int64_t *)pools.buf)[holder] >= num_pools)
            break;
        pool = &heap.pools[((const int64_t *)pools.buf)[holder]];
        if (event >= num_holders) {
            if (held[holder] <= 0)
                break;
            allocated -= heap.blocks[held[holder]].size;
            held[holder] = -held[holder];
        } else if (event < 0) {
            if (!held[holder])
                break;
            if (held[holder] > 0)
                allocated -= heap.blocks[held[holder]].size;
            if (held[holder] != NOBODY)
                release(&heap, pool, abs(held[holder]));
            held[holder] = 0;
        } else {
            int64_t size = ((const int64_t *)sizes.buf)[holder];
            int32_t number = allocate(&heap, pool, size, 0);
            if (!number) {
                if (heap.expandable || heap.beyond)
                    break;
                for (Py_ssize_t other = 0; other < num_holders; other++) /* after all streams are done */
                    if (held[other] < 0 && held[other] != NOBODY) {
                        release(&heap, &heap.pools[((const int64_t *)pools.buf)[other]], -held[other]);
                        held[other] = NOBODY;
                    }
                give_back(&heap, num_pools);
                retries++;
                if (!(number = allocate(&heap, pool, size, 1))) {
                    homeless = holder;
                    break;
                }
            }
            held[holder] = number;
            allocated += heap.blocks[number].size;
            if (allocated > peak)
                peak = allocated;
        }
    }
    for (Py_ssize_t pool = 0; heap.pools && pool < num_pools; pool++) {
        free(heap.pools[pool].keys);
        free(heap.pools[pool].free);
    }
    free(heap.blocks);
    free(heap.pools);
    free(held);
    PyBuffer_Release(&events);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&pools);
    if (heap.failed)
        return PyErr_NoMemory();
    if (homeless >= 0)
        return Py_BuildValue("nL", homeless, (long long)heap.reserved);
    if (!answered)
        Py_RETURN_NONE;
    return Py_BuildValue("LLLLnn", (long long)peak, (long long)allocated, (long long)heap.peak_reserved,
                         (long long)heap.reserved, heap.num_segments, retries);
}

static PyMethodDef methods[] = {{"replay", replay, METH_VARARGS, replay_doc}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pool_replay", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pool_replay(void)
{
    return PyModule_Create(&definition);
}
