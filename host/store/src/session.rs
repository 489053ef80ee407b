//! Protocol logic of the store server, without I/O: [`Session`] turns the bytes of one client into
//! answers, and [`ServerState`] is the state that all clients share.

use core::mem;
use std::collections::{HashMap, VecDeque};

use super::secret::{self, Role, StoreSecret};
use super::table::{ENTRY_BYTES, Table};
use super::wire::{self, Dialect, Request, RequestError, Writer};

/// Number of bytes of unsent answers at which the server stops handling a client's requests.
pub(super) const MAX_PENDING_ANSWER: usize = 1 << 20;

/// Maximum length of a counter in decimal: a sign and 19 digits.
const MAX_DECIMAL: usize = 20;

/// Identifies a client of a server.
pub(super) type Token = u64;

/// The state that all clients of a server share.
#[derive(Debug, Default)]
pub(super) struct ServerState {
    pub(super) table: Table,
    queues: HashMap<Vec<u8>, Queue>,
    /// Waiting clients by key. Each client is listed under the first of its keys that is missing.
    waiting: HashMap<Vec<u8>, Vec<Token>>,
    /// Clients that may stop waiting; see [`Session::wake`].
    pub(super) woken: Vec<Wake>,
    /// Number of requests that were handled.
    pub(super) requests: u64,
    /// Bytes in `queues`.
    queued: usize,
    /// Maximum number of bytes that may be stored, or `None` for no limit.
    pub(super) limit: Option<usize>,
}

/// A queue of values. The server offers each value to at most one waiting client, because a second
/// client would find the queue empty.
#[derive(Debug, Default)]
struct Queue {
    values: VecDeque<Vec<u8>>,
    /// Number of clients that hold an offer: clients that were woken for a value and have sent no
    /// request since.
    offers: usize,
}

/// A client that may stop waiting.
#[derive(Debug)]
pub(super) struct Wake {
    pub(super) token: Token,
    /// The queue that offers the client a value. [`Session::wake`] accepts or withdraws the offer.
    pub(super) offer: Option<Vec<u8>>,
}

impl ServerState {
    /// Returns an empty state in which at most `limit` bytes may be stored.
    pub(super) fn with_limit(limit: Option<usize>) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Returns true if no client is listed in `waiting` or holds an offer.
    #[cfg(test)]
    pub(super) fn has_no_waits_or_offers(&self) -> bool {
        self.waiting.is_empty() && self.queues.values().all(|queue| queue.offers == 0)
    }

    /// Returns the memory of the table and the queues, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.table.bytes() + self.queued
    }

    /// Fails if storing `bytes` more bytes under `key` would exceed the limit. The size of a value
    /// that the new one replaces is not subtracted.
    fn admit(&self, key: &[u8], bytes: usize) -> Result<(), String> {
        let sum = self.bytes() + key.len() + bytes + ENTRY_BYTES;
        match self.limit {
            Some(limit) if sum > limit => Err(full(limit)),
            _ => Ok(()),
        }
    }

    fn contains(&self, key: &[u8]) -> bool {
        self.table.contains(key)
            || (self.queues.get(key)).is_some_and(|queue| !queue.values.is_empty())
    }

    /// Returns true if a client need not wait for `key`. `offer` is the key of the queue that
    /// offers the client a value, if any.
    fn is_ready(&self, key: &[u8], offer: Option<&[u8]>) -> bool {
        let own = usize::from(offer == Some(key));
        self.table.contains(key)
            || (self.queues.get(key)).is_some_and(|queue| queue.values.len() + own > queue.offers)
    }

    fn all(&self, keys: &[&[u8]]) -> bool {
        keys.iter().all(|key| self.contains(key))
    }

    /// Wakes the clients that wait for `key`, which now exists.
    fn arrived(&mut self, key: &[u8]) {
        if let Some(tokens) = self.waiting.remove(key) {
            let wakes = tokens.into_iter().map(|token| Wake { token, offer: None });
            self.woken.extend(wakes);
        }
    }

    fn set(&mut self, key: &[u8], value: &[u8]) {
        self.table.set(key, value);
        self.arrived(key);
    }

    fn push(&mut self, key: &[u8], value: &[u8]) {
        self.queued += key.len() + value.len() + ENTRY_BYTES;
        let queue = self.queues.entry(key.to_vec()).or_default();
        queue.values.push_back(value.to_vec());
        self.offer(key);
    }

    fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let value = self.queues.get_mut(key)?.values.pop_front()?;
        self.queued -= key.len() + value.len() + ENTRY_BYTES;
        self.offer(key);
        Some(value)
    }

    /// Makes offers to waiting clients until every value of the queue is offered or no client
    /// waits. Removes the queue if it has neither values nor offers.
    fn offer(&mut self, key: &[u8]) {
        let Some(queue) = self.queues.get_mut(key) else {
            return;
        };
        while queue.values.len() > queue.offers
            && let Some(tokens) = self.waiting.get_mut(key)
        {
            let token = tokens.remove(0);
            if tokens.is_empty() {
                self.waiting.remove(key);
            }
            queue.offers += 1;
            self.woken.push(Wake {
                token,
                offer: Some(key.to_vec()),
            });
        }
        if queue.values.is_empty() && queue.offers == 0 {
            self.queues.remove(key);
        }
    }

    /// Ends an offer of the queue `key`. If the client did not pop the value, the value is offered
    /// to the next waiting client.
    pub(super) fn withdraw(&mut self, key: &[u8]) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.offers -= 1;
        }
        self.offer(key);
    }

    /// Returns the value of a key that a client has already waited for. The key may be absent
    /// because another rank has deleted it since. PyTorch 1.x has no answer for an absent key, so
    /// this function fails and the server closes the connection.
    fn present(&self, key: &[u8]) -> Result<&[u8], String> {
        self.table.get(key).ok_or_else(|| {
            format!(
                "key \"{}\" was asked for and does not exist",
                printable(key)
            )
        })
    }
}

/// Returns at most 100 characters of bytes from a client, with control characters escaped.
fn printable(bytes: &[u8]) -> String {
    const MAX_SHOWN: usize = 100;
    // A character has at most 4 bytes, so the cut is after the last character that is shown. A
    // replacement character at the cut is therefore never shown.
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * MAX_SHOWN + 4)]);
    let mut shown = text.escape_debug().take(MAX_SHOWN).collect::<String>();
    if text.escape_debug().nth(MAX_SHOWN).is_some() {
        shown += "..";
    }
    shown
}

/// Returns the error for a request that would make the server store or buffer more than `limit`
/// bytes.
pub(super) fn full(limit: usize) -> String {
    format!(
        "a server without a secret stores and buffers at most {} MiB; set FUSEWIRE_STORE_SECRET on \
         all ranks for more",
        limit >> 20
    )
}

/// The stages of a client's authentication.
#[derive(Debug)]
enum Stage {
    /// The authentication has not begun. Holds the secret of the server, if it has one.
    New(Option<StoreSecret>),
    /// The server has sent its nonce and proof. Holds the secret, the nonce of the client and the
    /// nonce of the server.
    Challenged(StoreSecret, secret::Token, secret::Token),
    /// The client is authenticated, or no secret is needed. Its requests are handled.
    Trusted,
}

/// The connection of one client.
#[derive(Debug)]
pub(super) struct Session {
    token: Token,
    stage: Stage,
    dialect: Option<Dialect>,
    /// Bytes that have arrived but have not been handled yet.
    incoming: Vec<u8>,
    /// Answers that have not been sent to the client yet.
    pub(super) outgoing: Vec<u8>,
    awaited: Option<PendingWait>,
    /// The queue that offers this client a value. The client's next request ends the offer.
    offer: Option<Vec<u8>>,
}

/// A wait request that has not been answered yet.
#[derive(Debug)]
struct PendingWait {
    keys: Vec<Vec<u8>>,
    /// Index into `keys` of the key under which [`ServerState::waiting`] lists the client.
    listed: usize,
    /// True for a barrier. A barrier ends at the first wake for its key, even if the key does not
    /// exist.
    barrier: bool,
}

impl Session {
    /// Returns a new session. If `secret` is given, the client must prove that it has the secret.
    pub(super) fn new(token: Token, secret: Option<StoreSecret>) -> Self {
        Self {
            token,
            stage: Stage::New(secret),
            dialect: None,
            incoming: Vec::new(),
            outgoing: Vec::new(),
            awaited: None,
            offer: None,
        }
    }

    /// Returns true if at least [`MAX_PENDING_ANSWER`] bytes of answers are unsent. The server then
    /// stops reading from the client.
    pub(super) fn is_full(&self) -> bool {
        self.outgoing.len() >= MAX_PENDING_ANSWER
    }

    /// Buffers bytes from the client, which [`Session::handle_all`] then handles.
    ///
    /// An error holds the reason for which the connection must be closed.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> Result<(), String> {
        if self.incoming.len() + bytes.len() > wire::MAX_REQUEST_BYTES {
            return Err("a request is too long".to_owned());
        }
        self.incoming.extend_from_slice(bytes);
        Ok(())
    }

    /// Handles the complete requests in the buffer, until [`Session::is_full`] returns true.
    ///
    /// An error holds the reason for which the connection must be closed.
    pub(super) fn handle_all(&mut self, hub: &mut ServerState) -> Result<(), String> {
        let incoming = mem::take(&mut self.incoming);
        let mut at = 0;
        while at < incoming.len() && !self.is_full() {
            match self.handle_first(&incoming[at..], hub) {
                Ok(length) => at += length,
                Err(RequestError::Incomplete) => break,
                Err(RequestError::Invalid(detail)) => return Err(detail),
            }
        }
        self.incoming = incoming;
        self.incoming.drain(..at);
        if self.incoming.is_empty() {
            // Release the memory of a large value now instead of at the end of the connection.
            self.incoming.shrink_to(4 << 10);
        }
        Ok(())
    }

    fn handle_first(&mut self, bytes: &[u8], hub: &mut ServerState) -> Result<usize, RequestError> {
        if !matches!(self.stage, Stage::Trusted) {
            return self.authenticate(bytes);
        }
        let dialect = match self.dialect {
            Some(dialect) => dialect,
            None => *self.dialect.insert(wire::dialect(bytes)?),
        };
        let (request, length) = wire::parse(bytes, dialect)?;
        hub.requests += 1;
        let offer = self.offer.take();
        let handled = self.handle(hub, request, dialect);
        if let Some(key) = offer {
            hub.withdraw(&key);
        }
        handled.map_err(RequestError::Invalid)?;
        Ok(length)
    }

    /// Handles the authentication bytes before the first request; see [`secret`].
    fn authenticate(&mut self, bytes: &[u8]) -> Result<usize, RequestError> {
        let refuse = |detail: &str| Err(RequestError::Invalid(detail.to_owned()));
        match &self.stage {
            Stage::Trusted => Ok(0),
            Stage::New(secret) => {
                let greets = bytes.first() == Some(&secret::HELLO);
                match (secret, greets) {
                    (None, false) => {
                        self.stage = Stage::Trusted;
                        Ok(0)
                    }
                    (None, true) => {
                        self.outgoing.push(secret::REFUSED);
                        refuse("a client has a secret, and this server has none")
                    }
                    (Some(_), false) => {
                        self.outgoing.extend(secret::SECRET_WANTED);
                        refuse("a client did not show that it has the secret")
                    }
                    (Some(secret), true) => {
                        let theirs = *bytes[1..].first_chunk().ok_or(RequestError::Incomplete)?;
                        let own = secret::nonce()
                            .map_err(|error| RequestError::Invalid(error.to_string()))?;
                        self.outgoing.push(secret::ACCEPTED);
                        self.outgoing.extend(own);
                        self.outgoing
                            .extend(secret.prove(Role::Server, &theirs, &own));
                        self.stage = Stage::Challenged(secret.clone(), theirs, own);
                        Ok(1 + secret::BYTES)
                    }
                }
            }
            Stage::Challenged(secret, theirs, own) => {
                let proof = bytes.first_chunk().ok_or(RequestError::Incomplete)?;
                if !secret.verify(Role::Client, theirs, own, proof) {
                    self.outgoing.push(secret::REFUSED);
                    return refuse("a client has another secret");
                }
                self.outgoing.push(secret::ACCEPTED);
                self.stage = Stage::Trusted;
                Ok(secret::BYTES)
            }
        }
    }

    fn handle(
        &mut self,
        hub: &mut ServerState,
        request: Request<'_>,
        dialect: Dialect,
    ) -> Result<(), String> {
        if dialect == Dialect::Legacy {
            // A legacy client cannot cancel a wait. It stops waiting and sends another request.
            self.forget_wait(hub);
        }
        let answer = Writer::default();
        let answer = match request {
            Request::Validate(magic) => {
                if magic != wire::VALIDATION_MAGIC {
                    return Err("the validation number is wrong; this is no store client".into());
                }
                answer
            }
            Request::Set(key, value) => {
                hub.admit(key, value.len())?;
                hub.set(key, value);
                answer
            }
            Request::CompareSet(key, expected, desired) => {
                hub.admit(key, desired.len())?;
                let (present, stored) = hub.table.compare_set(key, expected, desired);
                if stored {
                    hub.arrived(key);
                }
                answer.vector(&present)
            }
            Request::Get(key) => answer.vector(hub.present(key)?),
            Request::Add(key, amount) => {
                hub.admit(key, MAX_DECIMAL)?;
                let sum = hub.table.add(key, amount)?;
                hub.arrived(key);
                answer.i64(sum)
            }
            Request::Check(keys) => answer.u8(if hub.all(&keys) {
                wire::CHECK_READY
            } else {
                wire::CHECK_NOT_READY
            }),
            Request::Wait(keys) => {
                self.forget_wait(hub);
                self.awaited = Some(PendingWait {
                    keys: keys.into_iter().map(<[u8]>::to_vec).collect(),
                    listed: 0,
                    barrier: false,
                });
                self.recheck(hub);
                answer
            }
            Request::KeyCount => answer.i64(hub.table.len() as i64),
            Request::DeleteKey(key) => answer.i64(i64::from(hub.table.delete(key))),
            Request::Append(key, value) => {
                let len = hub.table.get(key).map_or(0, <[u8]>::len) + value.len();
                if len as u64 > wire::MAX_VALUE_BYTES {
                    return Err(format!("append makes a value of {len} bytes"));
                }
                hub.admit(key, value.len())?;
                hub.table.append(key, value);
                hub.arrived(key);
                answer
            }
            Request::MultiGet(keys) => {
                let mut answer = answer;
                let mut total = 0;
                for key in keys {
                    let value = hub.present(key)?;
                    total += value.len();
                    if total > wire::MAX_REQUEST_BYTES {
                        return Err("the answer is too long".into());
                    }
                    answer = answer.vector(value);
                }
                answer
            }
            Request::MultiSet(pairs) => {
                for (key, value) in pairs {
                    hub.admit(key, value.len())?;
                    hub.set(key, value);
                }
                answer
            }
            Request::CancelWait => {
                self.forget_wait(hub);
                answer.u8(wire::WAIT_CANCELED)
            }
            Request::Ping(nonce) => answer.u32(nonce),
            Request::QueuePush(key, value) => {
                hub.admit(key, value.len())?;
                hub.push(key, value);
                answer
            }
            Request::QueuePop(key) => match hub.pop(key) {
                Some(value) => answer.i64(1).vector(&value),
                None => answer.i64(0),
            },
            Request::QueueLen(key) => {
                let queue = hub.queues.get(key);
                answer.i64(queue.map_or(0, |queue| queue.values.len()) as i64)
            }
            Request::ListKeys => {
                let mut answer = answer.i64(hub.table.len() as i64);
                let mut total = 0;
                for key in hub.table.keys() {
                    total += key.len() + size_of::<u64>();
                    if total > wire::MAX_REQUEST_BYTES {
                        return Err("the list of keys is too long".into());
                    }
                    answer = answer.vector(key);
                }
                answer
            }
            Request::Barrier(key, size) => {
                hub.admit(key, MAX_DECIMAL)?;
                self.forget_wait(hub);
                // As in PyTorch, the counter is never reset, so a key serves only one barrier.
                if hub.table.add(key, 1)? >= size {
                    hub.arrived(key);
                    answer.u8(wire::STOP_WAITING)
                } else {
                    hub.waiting
                        .entry(key.to_vec())
                        .or_default()
                        .push(self.token);
                    self.awaited = Some(PendingWait {
                        keys: vec![key.to_vec()],
                        listed: 0,
                        barrier: true,
                    });
                    answer
                }
            }
        };
        self.outgoing.extend_from_slice(&answer.finish());
        Ok(())
    }

    /// Rechecks the pending wait of this client, which was woken. `offer` is the key of the queue
    /// that offers the client a value, if any.
    pub(super) fn wake(&mut self, hub: &mut ServerState, offer: Option<Vec<u8>>) {
        // Since the wake was queued, the client may have cancelled its wait, and it may wait for
        // other keys.
        if let Some(key) = offer {
            let awaited = self.awaited.as_ref();
            if self.offer.is_none() && awaited.is_some_and(|awaited| awaited.keys.contains(&key)) {
                self.offer = Some(key);
            } else {
                hub.withdraw(&key);
            }
        }
        self.recheck(hub);
    }

    /// Answers the pending wait if all its keys exist now. Otherwise lists the client under the
    /// first key that is missing. A barrier is answered at once.
    fn recheck(&mut self, hub: &mut ServerState) {
        let Some(mut awaited) = self.awaited.take() else {
            return;
        };
        // Keys may be created and deleted between the wake and this call, so the client may still
        // be listed under another key.
        self.unlist(hub, awaited.keys.get(awaited.listed));
        let offer = self.offer.as_deref();
        let missing = (awaited.keys.iter()).position(|key| !hub.is_ready(key, offer));
        if let Some(missing) = missing.filter(|_| !awaited.barrier) {
            hub.waiting
                .entry(awaited.keys[missing].clone())
                .or_default()
                .push(self.token);
            awaited.listed = missing;
            self.awaited = Some(awaited);
            // Another client can use the value while this client waits for the missing key.
            if let Some(key) = self.offer.take() {
                hub.withdraw(&key);
            }
            return;
        }
        if self.offer.is_none() && !awaited.barrier {
            self.offer = (awaited.keys.into_iter()).find(|key| hub.queues.contains_key(key));
            if let Some(queue) = self.offer.as_ref().and_then(|key| hub.queues.get_mut(key)) {
                queue.offers += 1;
            }
        }
        self.outgoing.push(wire::STOP_WAITING);
    }

    /// Returns the number of bytes that the server holds for this client: requests not handled yet,
    /// answers not sent yet, and the keys of a pending wait.
    pub(super) fn held(&self) -> usize {
        let keys = |awaited: &PendingWait| {
            let bytes = |key: &Vec<u8>| key.len() + ENTRY_BYTES;
            awaited.keys.iter().map(bytes).sum::<usize>()
        };
        self.incoming.len() + self.outgoing.len() + self.awaited.as_ref().map_or(0, keys)
    }

    /// Returns true if the client has not sent enough bytes to identify its dialect. It has then
    /// not sent a complete request either.
    pub(super) fn is_silent(&self) -> bool {
        self.dialect.is_none()
    }

    /// Returns the capacity of the buffers of this client, in bytes.
    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        self.incoming.capacity() + self.outgoing.capacity()
    }

    /// Drops the pending wait and the offer of a client whose connection is closed.
    pub(super) fn leave(&mut self, hub: &mut ServerState) {
        self.forget_wait(hub);
        if let Some(key) = self.offer.take() {
            hub.withdraw(&key);
        }
    }

    /// Drops the pending wait without an answer.
    fn forget_wait(&mut self, hub: &mut ServerState) {
        if let Some(awaited) = self.awaited.take() {
            self.unlist(hub, awaited.keys.get(awaited.listed));
        }
    }

    /// Removes the client from the list of clients that wait for `key`.
    fn unlist(&self, hub: &mut ServerState, key: Option<&Vec<u8>>) {
        if let Some(key) = key
            && let Some(tokens) = hub.waiting.get_mut(key)
        {
            tokens.retain(|token| *token != self.token);
            if tokens.is_empty() {
                hub.waiting.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn text_of_a_peer_is_escaped_and_short() {
        assert_eq!(printable(b"a/key"), "a/key");
        assert_eq!(
            printable(b"\x1b[2J\nfusewire: \xff"),
            "\\u{1b}[2J\\nfusewire: \u{fffd}"
        );
        let long = "\u{1f980}".repeat(1 << 16);
        assert_eq!(printable(long.as_bytes()), "\u{1f980}".repeat(100) + "..");
        assert_eq!(printable(&[b'x'; 100]), "x".repeat(100));
    }
}
