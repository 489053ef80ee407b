//! Waits and writes of streams order launches.

use core::time::Duration;
use std::thread;

use fusewire_emulator::{Buffer, Module, StreamOperation};

use super::*;

/// Configurations whose launches wait for the host, and that do not order launches of different
/// devices.
fn device_configs() -> impl Iterator<Item = Config> {
    configs().into_iter().map(|config| Config {
        idle: IdleTime::Host,
        order: LaunchOrder::Device,
        ..config
    })
}

/// Waits until the first word of a buffer has a value.
fn wait_for(buffer: &Buffer, value: u32) {
    while buffer.read_u32()[0] != value {
        thread::yield_now();
    }
}

/// Returns a kernel whose parameters are the data, a flag, and a word that ends it.
fn on_flag(code: &str) -> Arc<Module> {
    kernel(3, &format!("{code}\nret;"))
}

const READ: &str = "ld.global.u32 %r0, [%in0];";

/// A kernel of device 0 writes the data, raises the flag with `raise`, and runs until the kernel of
/// device 1 has read the data.
fn run_after_wait(config: Config, raise: &str, waits: bool) -> Result<(), Error> {
    let gpus = &Gpus::new(config);
    let [data, flag, end] = [(); 3].map(|()| gpus.allocate(0, 8));
    let launch = |module: &Arc<Module>, device| {
        let kernel = Kernel::new(module, "k").device(device);
        kernel.arg(&data).arg(&flag).arg(&end)
    };
    let writer = on_flag(&format!(
        "st.global.u32 [%in0], 1; {raise}
        END: ld.relaxed.sys.global.u32 %r1, [%in2]; setp.eq.u32 %p0, %r1, 0; @%p0 bra END;"
    ));
    let writer = launch(&writer, 0);
    thread::scope(|scope| {
        let running = scope.spawn(move || gpus.run(&[writer]));
        wait_for(&flag, 7);
        if waits {
            let address = flag.address();
            gpus.execute_on_stream(1, StreamOperation::Waited { address, value: 7 })?;
        }
        let result = gpus.run(&[launch(&on_flag(READ), 1)]);
        end.write(&1_u64.to_le_bytes());
        running.join().expect("the thread has not panicked")?;
        result.map(drop)
    })
}

#[test]
fn a_stream_that_waits_for_a_word_acquires_its_release() {
    for config in device_configs() {
        for raise in [
            "st.release.sys.global.u32 [%in1], 7;",
            "fence.acq_rel.sys; st.relaxed.sys.global.u32 [%in1], 7;",
            "membar.sys; st.volatile.global.u32 [%in1], 7;",
            "red.release.sys.global.add.u32 [%in1], 7;",
        ] {
            run_after_wait(config.clone(), raise, true).unwrap();
            let fault = expect_fault(run_after_wait(config.clone(), raise, false));
            assert_eq!(fault.kind, FaultKind::Race);
        }
        for raise in [
            "st.relaxed.sys.global.u32 [%in1], 7;",
            "st.global.u32 [%in1], 7;",
            "st.release.gpu.global.u32 [%in1], 7;",
            "fence.acq_rel.gpu; st.relaxed.sys.global.u32 [%in1], 7;",
            "st.release.sys.global.u64 [%in1], 7;",
        ] {
            let fault = expect_fault(run_after_wait(config.clone(), raise, true));
            assert_eq!(fault.kind, FaultKind::Race, "{raise}");
        }
    }
}

/// A kernel of device 0 writes the data. A kernel of device 1 waits for the flag with `wait`, then
/// reads the data.
fn run_before_write(
    config: Config,
    wait: &str,
    raise: impl FnOnce(&Gpus, &Buffer) -> Result<(), Error>,
) -> Result<(), Error> {
    let gpus = &Gpus::new(config);
    let [data, flag, started] = [(); 3].map(|()| gpus.allocate(0, 8));
    let launch = |code: &str, device| {
        let kernel = Kernel::new(&on_flag(code), "k").device(device);
        kernel.arg(&data).arg(&flag).arg(&started)
    };
    let reader = launch(
        &format!(
            "st.relaxed.sys.global.u32 [%in2], 1;
            LOOP: {wait} setp.ne.u32 %p0, %r1, 7; @%p0 bra LOOP;\n{READ}"
        ),
        1,
    );
    thread::scope(|scope| {
        let running = scope.spawn(move || gpus.run(&[reader]));
        wait_for(&started, 1);
        gpus.run(&[launch("st.global.u32 [%in0], 1;", 0)])?;
        raise(gpus, &flag)?;
        running
            .join()
            .expect("the thread has not panicked")
            .map(drop)
    })
}

#[test]
fn a_write_of_a_stream_releases_ended_launches() {
    const ACQUIRE: &str = "ld.acquire.sys.global.u32 %r1, [%in1];";
    let write_by = |device| {
        move |gpus: &Gpus, flag: &Buffer| {
            let address = flag.address();
            gpus.execute_on_stream(device, StreamOperation::Write { address, value: 7 })
        }
    };
    for config in device_configs() {
        for wait in [
            ACQUIRE,
            "ld.relaxed.sys.global.u32 %r1, [%in1]; fence.acq_rel.sys;",
            "ld.volatile.global.u32 %r1, [%in1]; membar.sys;",
        ] {
            run_before_write(config.clone(), wait, write_by(0)).unwrap();
        }
        let expect_race = |result| {
            let fault = expect_fault(result);
            assert_eq!(
                (fault.kind, &*fault.site.instruction),
                (FaultKind::Race, READ)
            );
        };
        for wait in [
            "ld.relaxed.sys.global.u32 %r1, [%in1];",
            "ld.acquire.gpu.global.u32 %r1, [%in1];",
            "ld.global.u32 %r1, [%in1];",
        ] {
            expect_race(run_before_write(config.clone(), wait, write_by(0)));
        }
        // The kernel of device 0 is not ordered before the stream of device 1, and the host's write
        // is not that of a stream.
        expect_race(run_before_write(config.clone(), ACQUIRE, write_by(1)));
        expect_race(run_before_write(config, ACQUIRE, |_, flag| {
            flag.write(&7_u64.to_le_bytes());
            Ok(())
        }));
    }
}

#[test]
fn an_event_orders_launches_of_two_devices() {
    let write = on_flag("st.global.u32 [%in0], 1;");
    for config in device_configs() {
        for (device, races) in [(None, true), (Some(0), false), (Some(2), true)] {
            let gpus = Gpus::new(config.clone());
            let data = gpus.allocate(0, 8);
            let launch = |device| {
                let kernel = Kernel::new(&write, "k").device(device);
                kernel.arg(&data).arg(&data).arg(&data)
            };
            gpus.run(&[launch(0)]).unwrap();
            if let Some(device) = device {
                gpus.execute_on_stream(1, StreamOperation::WaitedFor { device })
                    .unwrap();
            }
            match gpus.run(&[launch(1)]) {
                result if races => assert_eq!(expect_fault(result).kind, FaultKind::Race),
                result => drop(result.unwrap()),
            }
        }
    }
}

#[test]
fn operations_of_streams_check_their_address() {
    for memory in [MemoryModel::Unchecked, MemoryModel::Checked] {
        let gpus = Gpus::new(Config {
            memory,
            hang_after: Duration::from_secs(10),
            ..Config::default()
        });
        let word = gpus.allocate(0, 4);
        let address = word.address();
        gpus.execute_on_stream(0, StreamOperation::Write { address, value: 3 })
            .unwrap();
        assert_eq!(word.read_u32(), [3]);
        let text = |address, value| {
            let operation = StreamOperation::Write { address, value };
            let result = gpus.execute_on_stream(1, operation);
            result.unwrap_err().to_string()
        };
        let start = format!("write of a stream to the word {:#x}: ", address + 2);
        let text = [text(address + 2, 4), text(address + 4, 4)];
        assert_eq!(
            text[0],
            format!("{start}{:#x} is not a multiple of 4", address + 2)
        );
        assert!(text[1].contains("is accessible to device 1"), "{}", text[1]);
        let operation = StreamOperation::Waited {
            address: 4,
            value: 0,
        };
        let text = gpus
            .execute_on_stream(0, operation)
            .unwrap_err()
            .to_string();
        assert!(
            text.starts_with("wait of a stream for the word 0x4: reads"),
            "{text}"
        );
        assert_eq!(word.read_u32(), [3]);
    }
}
