"""The pages of the API: the public modules, and the order in which a page describes their names, that of their use.

A name in a module's `__all__` that is not listed here comes last. Other names that are not listed, and checks, are
internal helpers, which have no entry.
"""

# The public modules, by the title of their group, with one line on each.
MODULES = {
    "Users": {
        "jfcl": "simulations, types, local training, methods, mappings, sweeps",
        "jfcl.data": "federations, data sets, your own data, stores",
        "jfcl.models": "tasks, networks, pretrained models",
        "jfcl.augment": "random changes to training images",
        "jfcl.metrics": "metrics of outputs, and recovery of the clusters",
        "jfcl.plots": "figures of records, clusters and trees",
        "jfcl.experiments": "runs from configurations, and their results",
        "jfcl.experiments.trackers": "TensorBoard, Weights & Biases, MLflow",
        "jfcl.callbacks": "code that a run calls: early stopping, your own trackers",
        "jfcl.attacks": "attacks on updates and on data",
        "jfcl.privacy": "differential privacy of clients, and its accounting",
        "jfcl.parameter_tree": "the record of all splits of CFL; newcomers",
        "jfcl.theory": "the bounds of the papers",
        "jfcl.mapping": "from one client to all: sums, rows of several hosts",
        "jfcl.hosts": "several processes in one run",
        "jfcl.planning.plan": "the result of `jfcl.plan`",
        "jfcl.targets": "TPUs and GPUs that a run is compiled for",
    },
    "Kernels": {"jfcl.kernels": "arrays in, arrays out; usable without the rest of the library"},
    "Authors of methods": {
        "jfcl.testing": "the conformance test of methods",
        "jfcl.methods.averaging": "the round of FedAvg for K models, with any choice of a model",
        "jfcl.methods.mixture": "mixtures: FedAvg of a stack of K models, which clients weigh for each example",
        "jfcl.methods.round": "the phases of a round",
        "jfcl.methods.options": "options that methods share",
        "jfcl.core.options": "annotations of options, from which flags and checks follow",
        "jfcl.training.local": "local training of one client",
        "jfcl.robust.aggregate": "means over clusters, attacks, robust means",
        "jfcl.core": "checks, keys, parameters",
    },
}

# The names of a module by the titles of their sections. A module that is not here shows all its names.
SECTIONS = {
    "jfcl": {
        "Simulations": "simulate History evaluate cluster_recovery DivergedError rollout clear_programs",
        "Clients and tasks": "Clients stack_clients concatenate_clients Population Task",
        "Local training": "local_training",
        "Methods": "with_restarts assign_newcomer",
        "Sweeps, rankings and plans": "sweep Sweep shifts plan",
        "Hostile clients": "Adversary",
        "From one client to all": "use_all_cores auto chunked sharded pmapped client_mesh",
        "Your own method": "Algorithm Served Entries DenseStart",
    },
    "jfcl.data": {
        "Federations": "build Federation load Dataset hold_out in_bytes DATASETS HETEROGENEITY PARTITIONS",
        "Drift": "drift_pattern Drift PATTERNS",
        "Your own data": "from_arrays from_frame read_rows from_torch from_huggingface from_tfds tokenize",
        "Populations": "ClientStore generate_store mixture_of open_stores",
        "Partitions": "iid stratified by_label pathological dirichlet label_groups by_distribution"
        " power_law quantity lognormal by_sizes by_writer",
        "Problems of the papers": "ifca_regression fc_regression",
    },
    "jfcl.models": {
        "Tasks": "classification regression language_model task parameter_paths in_bfloat16",
        "Networks": "Linear MLP CNNMnist CNNCifar CNNFemnist CNN5 VGG ResNet ResNetBatchNorm MobileNet "
        "MobileNetBatchNorm ViT LSTMLanguageModel GPT MODELS LANGUAGE_MODELS",
        "Layers": "conv max_pool",
        "Pretrained models": "from_flax to_flax frozen lora merged cache_features",
    },
    "jfcl.metrics": {
        "Of outputs": "macro_f1 auc calibration_error confusion_matrix",
        "Of clusters": "contingency rounds_to_recovery",
        "Of drift": "drift_results",
        "Of mixtures": "mixture_recovery",
        "Of clients and seeds": "summarize deviation",
    },
    "jfcl.plots": {
        "Figures": "curves bars client_accuracies assignments similarity tree heatmap throughput",
        "Files": "save png new_figure",
    },
    "jfcl.experiments": {
        "Run": "Config run run_sweep setup",
        "Read": "load_run read_run load_params from_saved",
        "Compare and export": "compare report export_model",
    },
    "jfcl.experiments.trackers": {"": "TensorBoard WandB MLflow tracker TRACKERS"},
    "jfcl.callbacks": {"": "EarlyStopping Callback RunInfo End CallbackError"},
    "jfcl.attacks": {
        "On updates": "choose_malicious gaussian far sign_flip scaled zero nan mimic opposite ipm optimal_ipm alie "
        "optimal_alie min_max min_sum fang force_split hijack UPDATE_ATTACKS",
        "On data": "poison label_zero label_reverse noisy_inputs backdoor DATA_ATTACKS",
    },
    "jfcl.privacy": {"": "GaussianDP epsilon default_delta noise_of_sums SAMPLING"},
    "jfcl.parameter_tree": {
        "The tree": "nodes Node first_split models path",
        "Newcomers": "Assignment evaluate_paths PathEvaluation enrol leave",
    },
    "jfcl.mapping": {"": "map_reduce own_rows place num_rows platform_of or_auto divide_cpu num_cores"},
    "jfcl.hosts": {"": "connect devices several is_first fetch leave"},
    "jfcl.targets": {"": "target Target Chip mesh"},
    "jfcl.kernels": {
        "Similarities": "pairwise_cosine squared_distances separation_gap similarity_tolerance profile_distances "
        "principal_vectors subspace_angles ANGLES",
        "Bipartitions and dendrograms": "optimal_bipartition bipartition_of_updates Bipartition linkage_tree "
        "cut cut_by_silhouette ChosenCut silhouette knee LINKAGES",
        "Clusterings": "threshold_clustering kmeans KMeans least_cost_assignment spectral_clusters",
        "Robust aggregators": "mean coordinate_median trimmed_mean mean_around_median geometric_median centered_clip "
        "krum multi_krum bulyan caf smea monna dnc clipped_clustering sign_guard AGGREGATORS",
        "Pre-aggregators": "nearest_neighbour_mixing bucketing clip_norms adaptive_clip PRE_AGGREGATORS "
        "make_aggregator aggregator_options",
        "Secret transformations": "orthonormal Operator OPERATORS",
    },
    "jfcl.testing": {"": "check_algorithm problem Problem count_compilations"},
    "jfcl.methods.averaging": {"": "averaging Averaging AveragingState Report one_cluster keep_cluster"},
    "jfcl.methods.round": {
        "Start": "initial_models initial_scopes initial_optimizers",
        "Cohort": "select_cohort take_rows put_rows",
        "Training": "train_clients train_scopes",
        "Server": "weights_of server_update",
        "Metrics": "round_metrics loss_of_all",
    },
    "jfcl.core.options": {"": "Range Interval OneOf Needs Search check_options options_of Option"},
    "jfcl.training.local": {"": "LocalTraining train Trained steps_per_round"},
    "jfcl.robust.aggregate": {"": "cluster_mean robust_cluster_mean attacked attacked_models ravel_clients"},
    "jfcl.core": {
        "Clients": "num_clients max_examples mask client_ids take_clients check_clients Packed unpacked",
        "Keys": "client_keys server_key attack_key",
        "Parameters": "parameter_names get_parameter set_parameter joined trained_part num_bytes is_finite",
        "Checks": "check check_choice check_count check_finite check_shape",
    },
}
