use fusewire_emulator::Module;
use std::time::Instant;
fn main() {
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).unwrap();
        let start = Instant::now();
        let module = match Module::parse(&text) {
            Ok(m) => m,
            Err(e) => {
                println!("{path}: {e}");
                continue;
            }
        };
        let parsed = start.elapsed();
        let r = module.decode_all();
        println!(
            "{path}: {} kernels parse {:?} decode {:?} {:?}",
            module.entries().len(),
            parsed,
            start.elapsed(),
            r.err().map(|e| e.to_string())
        );
    }
}
