// Fake of libibverbs with one device, "fake0". It transfers nothing: it completes every request at
// once, and appends a line for each call to the file that FUSEWIRE_FAKE_VERBS_RECORD names.

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr

enum { INLINE_BYTES = 64, SLOTS = 1024 };

struct fake_cq {
    struct ibv_cq cq;
    struct ibv_wc done[SLOTS];
    unsigned first, end;
};

static struct ibv_device device = {.name = "fake0"};
static struct ibv_device *list[2] = {&device, NULL};
static int next_key = 0x100, next_pair = 0x20;

static void note(const char *format, ...)
{
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    FILE *file = fopen(getenv("FUSEWIRE_FAKE_VERBS_RECORD"), "a");
    fprintf(file, "%s\n", line);
    fclose(file);
}

static int poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *completions)
{
    struct fake_cq *fake = (struct fake_cq *)cq;
    int found = 0;
    while (found < count && fake->first != fake->end)
        completions[found++] = fake->done[fake->first++ % SLOTS];
    return found;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited) { return 0; }

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    return 0;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct fake_cq *fake = (struct fake_cq *)qp->send_cq;
    for (; wr; wr = wr->next) {
        note("send opcode=%d flags=%#x local=%#lx+%u lkey=%#x remote=%#lx rkey=%#x", wr->opcode,
             wr->send_flags, wr->num_sge ? wr->sg_list->addr : 0,
             wr->num_sge ? wr->sg_list->length : 0, wr->num_sge ? wr->sg_list->lkey : 0,
             wr->wr.rdma.remote_addr, wr->wr.rdma.rkey);
        struct ibv_wc *done = &fake->done[fake->end++ % SLOTS];
        memset(done, 0, sizeof *done);
        done->wr_id = wr->wr_id;
    }
    eventfd_write(qp->send_cq->channel->fd, 1);
    return 0;
}

struct ibv_device **ibv_get_device_list(int *count)
{
    *count = 1;
    return list;
}

void ibv_free_device_list(struct ibv_device **devices) {}

const char *ibv_get_device_name(struct ibv_device *named) { return named->name; }

struct ibv_context *ibv_open_device(struct ibv_device *opened)
{
    struct ibv_context *context = calloc(1, sizeof *context);
    context->device = opened;
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    free(context);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->max_qp_wr = 64;
    attributes->max_qp_rd_atom = 4;
    attributes->max_qp_init_rd_atom = 8;
    attributes->phys_port_cnt = 1;
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t number, struct _compat_ibv_port_attr *port)
{
    struct ibv_port_attr *attributes = (struct ibv_port_attr *)port;
    attributes->state = IBV_PORT_ACTIVE;
    attributes->active_mtu = IBV_MTU_2048;
    attributes->gid_tbl_len = 1;
    attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index,
                      struct ibv_gid_entry *entry, uint32_t flags, size_t bytes)
{
    static const uint8_t address[16] = {[10] = 0xff, 0xff, 127, 0, 0, 1};
    memcpy(entry->gid.raw, address, sizeof address);
    entry->gid_type = IBV_GID_TYPE_ROCE_V2;
    return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *domain = calloc(1, sizeof *domain);
    domain->context = context;
    return domain;
}

int ibv_dealloc_pd(struct ibv_pd *domain)
{
    free(domain);
    return 0;
}

static struct ibv_mr *region(void)
{
    struct ibv_mr *made = calloc(1, sizeof *made);
    made->lkey = next_key++;
    made->rkey = made->lkey + 0x1000;
    return made;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *start, size_t length, int access)
{
    note("reg_mr start=%p length=%zu access=%#x", start, length, access);
    return region();
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t length,
                                 uint64_t address, int fd, int access)
{
    char path[64], target[256];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t count = readlink(path, target, sizeof target - 1);
    target[count < 0 ? 0 : count] = 0;
    note("reg_dmabuf_mr offset=%lu length=%zu address=%#lx access=%#x of %s", offset, length,
         address, access, target);
    return region();
}

int ibv_dereg_mr(struct ibv_mr *ended)
{
    note("dereg_mr lkey=%#x", ended->lkey);
    free(ended);
    return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct ibv_comp_channel *channel = calloc(1, sizeof *channel);
    channel->context = context;
    channel->fd = eventfd(0, EFD_CLOEXEC);
    return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    close(channel->fd);
    free(channel);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *data,
                             struct ibv_comp_channel *channel, int vector)
{
    struct fake_cq *fake = calloc(1, sizeof *fake);
    fake->cq.context = context;
    fake->cq.channel = channel;
    return &fake->cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
    free(cq);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **data)
{
    // The caller does not use the completion queue of the event.
    eventfd_t value;
    *cq = NULL;
    return eventfd_read(channel->fd, &value);
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) {}

struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *attributes)
{
    struct ibv_qp *qp = calloc(1, sizeof *qp);
    qp->context = domain->context;
    qp->send_cq = attributes->send_cq;
    qp->qp_num = next_pair++;
    attributes->cap.max_inline_data = INLINE_BYTES;
    note("create_qp %#x type=%d send=%u receive=%u", qp->qp_num, attributes->qp_type,
         attributes->cap.max_send_wr, attributes->cap.max_recv_wr);
    return qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask)
{
    switch (attributes->qp_state) {
    case IBV_QPS_INIT:
        note("init %#x mask=%#x port=%u access=%#x", qp->qp_num, mask, attributes->port_num,
             attributes->qp_access_flags);
        break;
    case IBV_QPS_RTR:
        note("rtr %#x mask=%#x peer=%#x mtu=%d global=%u index=%u hops=%u class=%u reads=%u",
             qp->qp_num, mask, attributes->dest_qp_num, attributes->path_mtu,
             attributes->ah_attr.is_global, attributes->ah_attr.grh.sgid_index,
             attributes->ah_attr.grh.hop_limit, attributes->ah_attr.grh.traffic_class,
             attributes->max_dest_rd_atomic);
        break;
    default:
        note("rts %#x mask=%#x timeout=%u retries=%u rnr=%u reads=%u", qp->qp_num, mask,
             attributes->timeout, attributes->retry_cnt, attributes->rnr_retry,
             attributes->max_rd_atomic);
    }
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
    note("destroy_qp %#x", qp->qp_num);
    free(qp);
    return 0;
}
