//! The models and controls of loom.
use fusewire_models::play::{Blocks, Play};
use fusewire_models::report::{Bound, Entry};
use fusewire_models::step::{Op, Step};
use fusewire_models::world::{Config, Parts, World};

pub(crate) fn entries() -> Vec<Entry> {
    let packets = Parts { packets: true, ..Parts::default() };
    let rounds = Parts { rounds: true, ..Parts::default() };
    let channels = Parts { channels: true, ..Parts::default() };
    let mut entries = Vec::new();
    for epochs in 1..=4usize {
        let w = World::new(Config::new(2, packets));
        entries.push(Entry::model(&format!("packet {epochs}"), Bound::Exhaustive, Play::new(w, Blocks::Single, vec![Step::new(Op::Packet, 2); epochs])).within(20));
        let w = World::new(Config::new(2, packets));
        entries.push(Entry::model(&format!("LL {epochs}"), Bound::Exhaustive, Play::new(w, Blocks::Solo, vec![Step::new(Op::Packet, 2); epochs])).within(20));
        let w = World::new(Config::new(2, rounds));
        entries.push(Entry::model(&format!("signal {epochs}"), Bound::Exhaustive, Play::new(w, Blocks::Single, vec![Step::new(Op::Signal, 8); epochs])).within(20));
        let w = World::new(Config::new(2, rounds));
        entries.push(Entry::model(&format!("barrier {epochs}"), Bound::Exhaustive, Play::new(w, Blocks::Single, vec![Step::new(Op::Barrier, 0); epochs])).within(20));
        let w = World::new(Config::new(2, channels));
        entries.push(Entry::model(&format!("channel {epochs}"), Bound::Exhaustive, Play::new(w, Blocks::Single, vec![Step::new(Op::Transfer(0, 1), 40); epochs])).within(20));
    }
    entries
}
