//! Tests with the environment variables that launchers set.

use super::*;

fn environment(pairs: &'static [(&str, &str)]) -> impl Fn(&str) -> Option<String> {
    move |name| {
        pairs
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    }
}

fn rank_size(pairs: &'static [(&str, &str)]) -> Result<(u32, u32)> {
    RankSize::from_variables(&environment(pairs)).map(|found| (found.rank, found.size))
}

#[test]
fn the_order_is_torchcomms() {
    // All launchers set the same rank and size. The local rank shows which launcher's variables
    // were read.
    let all = &[
        ("RANK", "4"),
        ("WORLD_SIZE", "9"),
        ("LOCAL_RANK", "4"),
        ("PALS_RANKID", "4"),
        ("PALS_SIZE", "9"),
        ("PALS_LOCAL_RANKID", "3"),
        ("PMI_RANK", "4"),
        ("PMI_SIZE", "9"),
        ("PMI_LOCAL_RANK", "2"),
        ("OMPI_COMM_WORLD_RANK", "4"),
        ("OMPI_COMM_WORLD_SIZE", "9"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ];
    for (count, expected) in [(12, 1), (9, 2), (6, 3), (3, 4)] {
        let found = RankSize::from_variables(&environment(&all[..count])).unwrap();
        assert_eq!((found.rank, found.size), (4, 9));
        assert_eq!(found.local_rank, Some(expected));
    }
    let explicit = &[
        ("TORCHCOMM_RANK", "0"),
        ("TORCHCOMM_SIZE", "2"),
        ("PMI_RANK", "4"),
        ("PMI_SIZE", "9"),
    ];
    assert_eq!(rank_size(explicit).unwrap(), (0, 2));
}

#[test]
fn torchrun_below_an_mpi_launcher_is_the_inner_one() {
    const OUTER: [&[(&str, &str)]; 3] = [
        &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")],
        &[("PMI_RANK", "0"), ("PMI_SIZE", "1")],
        &[("PALS_RANKID", "0"), ("PALS_SIZE", "1")],
    ];
    const INNER: &[(&str, &str)] = &[
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("TORCHELASTIC_RUN_ID", "none"),
    ];
    for outer in OUTER {
        let both = |name: &str| environment(outer)(name).or_else(|| environment(INNER)(name));
        let found = RankSize::from_variables(&both).unwrap();
        assert_eq!(
            (found.rank, found.size, found.local_rank),
            (1, 2, Some(1)),
            "{outer:?}"
        );
        let chosen = |name: &str| match name {
            QUERY_METHOD => Some("mpi".to_owned()),
            _ => both(name),
        };
        let expected = if outer[0].0.starts_with("PALS") {
            None
        } else {
            Some((0, 1))
        };
        let found = RankSize::find(&chosen).unwrap();
        assert_eq!(found.map(|found| (found.rank, found.size)), expected);
    }
}

#[test]
fn pairs_that_disagree_are_an_error_that_names_both() {
    const PAIRS: &[(&str, &str)] = &[
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "1"),
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
    ];
    let error = rank_size(PAIRS).unwrap_err().to_string();
    for part in [
        "OMPI_COMM_WORLD_RANK=0 of OMPI_COMM_WORLD_SIZE=1",
        "RANK=1 of WORLD_SIZE=2",
        "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD to mpi or torchrun",
    ] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    for (method, expected) in [("mpi", (0, 1)), ("torchrun", (1, 2))] {
        let chosen = |name: &str| match name {
            QUERY_METHOD => Some(method.to_owned()),
            _ => environment(PAIRS)(name),
        };
        let found = RankSize::from_variables(&chosen).unwrap();
        assert_eq!((found.rank, found.size), expected);
    }
}

#[test]
fn the_method_restricts_the_search() {
    const MPI: &[(&str, &str)] = &[
        (QUERY_METHOD, "torchrun"),
        ("PMI_RANK", "0"),
        ("PMI_SIZE", "1"),
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
    ];
    assert_eq!(rank_size(MPI).unwrap(), (1, 2));
    assert!(rank_size(&[(QUERY_METHOD, "env"), ("RANK", "0"), ("WORLD_SIZE", "1")]).is_err());
}

#[test]
fn errors_say_which_variable() {
    let cases: [(&'static [(&str, &str)], &str); 6] = [
        (&[], "neither rank nor size"),
        (&[("RANK", "0")], "RANK is set but WORLD_SIZE is not"),
        (&[("PMI_SIZE", "2")], "PMI_SIZE is set but PMI_RANK is not"),
        (&[("RANK", "zero"), ("WORLD_SIZE", "2")], "RANK=\"zero\""),
        (&[("RANK", "0"), ("WORLD_SIZE", "-1")], "WORLD_SIZE=\"-1\""),
        (
            &[("RANK", "2"), ("WORLD_SIZE", "2")],
            "RANK=2 must be less than WORLD_SIZE=2",
        ),
    ];
    for (pairs, message) in cases {
        let error = rank_size(pairs).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn slurm_counts_in_a_step_alone() {
    const STEP: &[(&str, &str)] = &[
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "3"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_STEP_NUM_NODES", "1"),
        ("SLURM_LOCALID", "3"),
    ];
    let found = RankSize::from_variables(&environment(STEP)).unwrap();
    assert_eq!((found.rank, found.size), (3, 4));
    assert_eq!((found.local_rank, found.local_size), (Some(3), Some(4)));
    assert!(is_on_one_host(&environment(STEP), 3, 4));
    assert!(rank_size(&STEP[1..]).is_err(), "a batch script");
    let two = |name: &str| match name {
        "SLURM_STEP_NUM_NODES" => Some("2".to_owned()),
        _ => environment(STEP)(name),
    };
    assert!(!is_on_one_host(&two, 3, 4));
    let timeout = Duration::from_secs(1);
    let error = store_from_variables(&two, 3, 4, timeout).unwrap_err();
    assert!(error.to_string().contains("MASTER_ADDR"), "{error}");
    let torchrun = |name: &str| match name {
        "RANK" => Some("1".to_owned()),
        "WORLD_SIZE" => Some("2".to_owned()),
        _ => environment(STEP)(name),
    };
    assert_eq!(RankSize::from_variables(&torchrun).unwrap().rank, 1);
    let slurm = |name: &str| match name {
        QUERY_METHOD => Some("slurm".to_owned()),
        _ => torchrun(name),
    };
    assert_eq!(RankSize::from_variables(&slurm).unwrap().rank, 3);
}

#[test]
fn half_a_pair_does_not_hide_a_whole_one() {
    let pairs = &[("PALS_RANKID", "7"), ("RANK", "1"), ("WORLD_SIZE", "2")];
    assert_eq!(rank_size(pairs).unwrap(), (1, 2));
}

#[test]
fn local_ranks_are_read() {
    let pairs = environment(&[("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")]);
    let found = RankSize::from_variables(&pairs).unwrap();
    assert_eq!((found.local_rank, found.local_size), (Some(1), None));
}

#[test]
fn rank_zero_hosts_the_store_unless_an_agent_does() {
    let free = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let port = free.port().to_string();
    drop(free);
    let variables = |agent: bool| {
        let port = port.clone();
        move |name: &str| match name {
            "MASTER_ADDR" => Some("localhost".to_owned()),
            "MASTER_PORT" => Some(port.clone()),
            "TORCHELASTIC_USE_AGENT_STORE" if agent => Some("True".to_owned()),
            _ => None,
        }
    };
    let timeout = Duration::from_secs(20);
    let host = store_from_variables(&variables(false), 0, 2, timeout).unwrap();
    let peer = store_from_variables(&variables(false), 1, 2, timeout).unwrap();
    let agent = store_from_variables(&variables(true), 0, 2, timeout).unwrap();
    assert_eq!(
        (host.is_host(), peer.is_host(), agent.is_host()),
        (true, false, false)
    );
    peer.store().set("attempt-/k", b"v").unwrap();
    assert_eq!(agent.store().get("k", timeout).unwrap(), b"v");

    let missing = environment(&[("MASTER_ADDR", "localhost")]);
    let error = store_from_variables(&missing, 0, 1, timeout).unwrap_err();
    assert!(
        error.to_string().contains("MASTER_PORT is not set"),
        "{error}"
    );
    let wrong = environment(&[("MASTER_ADDR", "localhost"), ("MASTER_PORT", "70000")]);
    let error = store_from_variables(&wrong, 0, 1, timeout).unwrap_err();
    assert!(error.to_string().contains("no port number"), "{error}");
}

#[test]
fn the_store_listens_only_where_it_was_asked_to() {
    let free = TcpStoreServer::bind("127.0.0.1:0").unwrap().port();
    let reach = |ip: &str| std::net::TcpStream::connect((ip, free)).is_ok();
    let server = host_server(&environment(&[]), "127.0.0.1", free).unwrap();
    assert!(reach("127.0.0.1") && !reach("127.0.0.2"));
    drop(server);
    let everywhere = environment(&[(BIND, "0.0.0.0")]);
    let server = host_server(&everywhere, "127.0.0.1", free).unwrap();
    assert!(reach("127.0.0.1") && reach("127.0.0.2"));
    drop(server);
    let error = host_server(&environment(&[]), "192.0.2.1", free).unwrap_err();
    assert!(error.to_string().contains(BIND), "{error}");
    let _other_job = TcpStoreServer::bind_with(("127.0.0.1", free), None).unwrap();
    let error = host_server(&environment(&[]), "127.0.0.1", free).unwrap_err();
    assert!(error.to_string().contains("another job"), "{error}");
}

/// On Debian, a host resolves its own name to 127.0.1.1. If `MASTER_ADDR` was such a name, an
/// earlier version listened on all addresses.
#[test]
fn a_name_of_the_loopback_is_served_on_the_loopback_alone() {
    use std::net::ToSocketAddrs;
    let host = fs::read_to_string("/etc/hostname").unwrap_or_default();
    let names = ["ip6-localhost", "ip6-loopback", host.trim()];
    let Some(name) = names.into_iter().find(|name| {
        let found = (*name, 0).to_socket_addrs();
        found.is_ok_and(|mut found| found.all(|address| address.ip().is_loopback()))
    }) else {
        eprintln!("skipped: {names:?} are no names of the loopback here");
        return;
    };
    let free = TcpStoreServer::bind("127.0.0.1:0").unwrap().port();
    let server = host_server(&environment(&[]), name, free).unwrap();
    for address in server.addresses() {
        assert!(address.ip().is_loopback(), "{name}: {address}");
    }
    let message = exposure(name, server.addresses(), false).unwrap();
    assert!(message.contains("other hosts cannot connect"), "{message}");
    assert!(message.contains(BIND), "{message}");
    assert_eq!(exposure(name, server.addresses(), true), None);
}

#[test]
fn a_store_that_others_reach_is_reported() {
    let addresses = |text: &str| vec![text.parse::<SocketAddr>().unwrap()];
    let reachable = exposure("10.0.0.5", &addresses("10.0.0.5:29500"), true).unwrap();
    assert!(reachable.contains("10.0.0.5:29500"), "{reachable}");
    assert!(reachable.contains("FUSEWIRE_STORE_SECRET"), "{reachable}");
    for host in ["127.0.0.1", "localhost", "::1"] {
        assert_eq!(exposure(host, &addresses("127.0.0.1:29500"), false), None);
    }
}

#[test]
fn an_ipv6_address_may_have_brackets() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("skipped: there is no IPv6 here");
        return;
    }
    let server = TcpStoreServer::bind("[::1]:0").unwrap();
    let port = server.port().to_string();
    let variables = |name: &str| match name {
        "MASTER_ADDR" => Some("[::1]".to_owned()),
        "MASTER_PORT" => Some(port.clone()),
        _ => None,
    };
    let timeout = Duration::from_secs(5);
    let store = store_from_variables(&variables, 1, 2, timeout).unwrap();
    store.store().set("k", b"v").unwrap();
}

/// A PyTorch master on rank 0 counts its workers under a store key that lacks the usual prefix.
#[test]
fn a_rank_joins_as_a_worker_of_pytorch() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let port = server.port().to_string();
    let variables = |name: &str| match name {
        "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
        "MASTER_PORT" => Some(port.clone()),
        _ => None,
    };
    let timeout = Duration::from_secs(5);
    let store = store_from_variables(&variables, 1, 2, timeout).unwrap();
    assert_eq!(store.store().num_keys().unwrap(), 1);
    assert!(store.store().list_keys().unwrap().is_empty());
}

#[test]
fn hydras_local_ranks_are_read() {
    let pairs = environment(&[
        ("PMI_RANK", "3"),
        ("PMI_SIZE", "4"),
        ("MPI_LOCALRANKID", "1"),
        ("MPI_LOCALNRANKS", "2"),
    ]);
    let found = RankSize::from_variables(&pairs).unwrap();
    assert_eq!((found.local_rank, found.local_size), (Some(1), Some(2)));
}

#[test]
fn the_host_has_a_name() {
    assert!(!host_id().unwrap().is_empty());
}
