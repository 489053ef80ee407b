//! all_reduce by packets, in two shots. Protocol: [`fusewire_device::packet`], with two epochs a
//! launch: in the first, a rank sends to each rank its part of the input; in the second, its own
//! part of the result.
//!
//! A lane sends a pair of the second epoch as soon as it has reduced it, without a barrier. The
//! protocol says that a rank has read all streams of an epoch before it releases its stream of the
//! next one to a peer:
//!
//! - The lane that sends a pair to all peers has received the same pair from all of them;
//! - the lane that sends the header to a peer has received that peer's header.
//!
//! So the peer, which overwrites a slot only after it has received all of the stream, overwrites
//! what has been read.

use fusewire_device::element::{Average, Max, Reduction, Sum};
use fusewire_device::mem::{self, Policy};
use fusewire_device::packet::{PAIR_DATA, Slots};
use fusewire_device::session::{Session, Unvoted};
use fusewire_device::{Aborted, Bf16, Element, F16, Group, In, Machine, Out, bulk, kernel};

use super::parts::{AT_ONCE, Parts, ranks_from, send_parts};
use super::{AllReducePacketParams, receive_headers, reduce_pairs, reduce_streams, write_pair};

/// Runs an all_reduce by packets in two shots. The output may be the input. All ranks must be
/// reachable by load and store.
///
/// # Safety
/// During the launch, nothing else may write the input or access the output.
#[kernel(
    params = AllReducePacketParams,
    each(T: f32 = f32, f16 = F16, bf16 = Bf16),
    each(O: sum = Sum, average = Average, max = Max)
)]
pub unsafe fn all_reduce_packet_two_shot<T: Element, O: Reduction<T>>(
    session: &mut Session<impl Machine>,
    source: In<T>,
    target: Out<T>,
) -> Result<(), Aborted> {
    let count = session.count() as usize;
    let (source, target) = (
        source.require(session, count)?,
        target.require(session, count)?,
    );
    let (start, end) = session.block().slice(count, crate::ALIGNMENT);
    let first = start * size_of::<T>();
    let from = source.as_ptr().cast::<u8>().wrapping_add(first);
    let to = target.as_ptr().cast::<u8>().wrapping_add(first);
    let parts = Parts::new((end - start) * size_of::<T>(), session.ranks());
    let scattered = Slots::open_direct(session, parts.each())?;
    let gathered = Slots::open_direct(session, parts.each())?;
    // SAFETY: `from` and `to` have the bytes of `parts`, because `target` is as long as `source`.
    let received = unsafe {
        send_parts(session, &scattered, from, parts);
        reduce_and_gather::<_, T, O>(session, [&scattered, &gathered], from, to, parts)
    };
    // No lane uses what another one has received, so one vote suffices, at the end.
    session.fail_at_end(received);
    gathered.close(session);
    Ok(())
}

/// Reduces this rank's part of the streams of the first slots, sends the result by the second ones,
/// and receives the results of all other ranks. Each lane returns its own outcome.
///
/// # Safety
/// `from` and `to` must be this block's part of the input and of the output, and have the bytes of
/// `parts`. All parts must have been sent.
#[inline(always)]
unsafe fn reduce_and_gather<M: Machine, T: Element, O: Reduction<T>>(
    session: &Session<M>,
    [scattered, gathered]: [&Slots; 2],
    from: *const u8,
    to: *mut u8,
    parts: Parts,
) -> Unvoted<()> {
    let (me, ranks) = (session.comm().rank(), session.comm().size());
    let (first, bytes) = parts.of(me);
    let own = to.wrapping_add(first);
    if M::LANES == 1 {
        let from = from.wrapping_add(first);
        // SAFETY: the precondition of this function.
        let reduced = unsafe { reduce_streams::<_, T, O>(session, scattered, from, own, bytes) };
        if reduced.is_failed() {
            return reduced;
        }
        for step in 1..ranks {
            let [peer] = ranks_from(session, step, ranks);
            // SAFETY: the part is readable, and no longer than the streams of the slots.
            unsafe { gathered.send_stream(session, peer, own, bytes) };
        }
        // SAFETY: the precondition of this function.
        return unsafe { gather_streams(session, gathered, to, parts) };
    }
    // SAFETY: each pair is one of this rank's part.
    let reduced = unsafe {
        reduce_pairs::<_, T, O>(session, scattered, bytes, |pair, data| {
            write_pair::<T>(own, bytes, pair, data);
            let mut step = 1;
            while step < ranks {
                gathered.send_pairs(session, pair, [data; AT_ONCE], [step, ranks]);
                step += AT_ONCE as u32;
            }
        })
    };
    // The slots of the first epoch are this rank's alone until it has sent the headers.
    scattered.close(session);
    if reduced.is_failed() {
        return reduced;
    }
    let block = session.block();
    let mut peer = block.size() - 1 - block.rank();
    while peer < ranks {
        // SAFETY: `open_direct` has checked that all ranks are reachable.
        unsafe { gathered.send_header(session, peer) };
        peer += block.size();
    }
    // SAFETY: the precondition of this function.
    unsafe { gather_pairs::<_, T>(session, gathered, to, parts) }
}

/// Copies the streams of all other ranks to their parts of the output. For blocks of one lane.
///
/// # Safety
/// `to` must be writable for the bytes of `parts`, which the streams must have.
#[inline(always)]
unsafe fn gather_streams<M: Machine>(
    session: &Session<M>,
    slots: &Slots,
    to: *mut u8,
    parts: Parts,
) -> Unvoted<()> {
    let ranks = session.comm().size();
    for step in 1..ranks {
        let [peer] = ranks_from(session, step, ranks);
        let (first, bytes) = parts.of(peer);
        let arrived = slots.receive_stream(session, peer);
        let Some(stream) = arrived.ok() else {
            return arrived.map(|_| ());
        };
        let to = to.wrapping_add(first);
        // SAFETY: the stream has been acquired, and has the part's bytes, as has the output.
        unsafe { bulk::copy(session.block(), to, stream, bytes, Policy::Cached) };
    }
    Unvoted::new(())
}

/// Writes the pairs of all other ranks to their parts of the output. For blocks of several lanes.
/// Each lane returns its own outcome.
///
/// # Safety
/// `to` must be writable for the bytes of `parts`, which the streams must have.
#[inline(always)]
unsafe fn gather_pairs<M: Machine, T: Element>(
    session: &Session<M>,
    slots: &Slots,
    to: *mut u8,
    parts: Parts,
) -> Unvoted<()> {
    let ranks = session.comm().size();
    let is_aligned = (to as usize).is_multiple_of(PAIR_DATA);
    let mut outcome = receive_headers(session, slots);
    for pair in session.block().elements_of_block(parts.each() / PAIR_DATA) {
        let mut step = 1;
        while step < ranks && !outcome.is_failed() {
            let peers = ranks_from::<_, AT_ONCE>(session, step, ranks);
            // SAFETY: these are ranks; the pair is one of the first part, and fits the slot.
            let peek =
                |i: usize| unsafe { slots.peek_pairs::<1>(session.comm(), peers[i], 1 + pair) };
            let seen = [peek(0), peek(1), peek(2), peek(3)];
            let there = seen[0].1 & seen[1].1 & seen[2].1 & seen[3].1;
            let is_whole = is_aligned && parts.have(peers, pair);
            if is_whole && there {
                let write = |i: usize| {
                    let at = peers[i] as usize * parts.each() + pair * PAIR_DATA;
                    // SAFETY: the pair is within the peer's part by the condition, and aligned.
                    unsafe { mem::write(to.wrapping_add(at).cast::<u64>(), seen[i].0[0]) };
                };
                write(0);
                write(1);
                write(2);
                write(3);
                step += AT_ONCE as u32;
                continue;
            }
            // Awaits one pair, and writes it if the pairs are not written together.
            let peer = match [seen[0].1, seen[1].1, seen[2].1] {
                _ if !is_whole => peers[0],
                [false, ..] => peers[0],
                [_, false, _] => peers[1],
                [.., false] => peers[2],
                _ => peers[3],
            };
            let (first, bytes) = parts.of(peer);
            if pair * PAIR_DATA < bytes {
                // SAFETY: the pair begins within the peer's part, so it is in its stream.
                let arrived = unsafe { slots.receive_pair(session, peer, 1 + pair) };
                match arrived.ok() {
                    Some(_) if is_whole => continue,
                    // SAFETY: the output has the part's bytes.
                    Some(data) => unsafe {
                        write_pair::<T>(to.wrapping_add(first), bytes, pair, data);
                    },
                    None => outcome = arrived.map(|_| ()),
                }
            }
            step += 1;
        }
        if outcome.is_failed() {
            break;
        }
    }
    outcome
}
