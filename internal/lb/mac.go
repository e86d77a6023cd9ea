package lb

// MAC is a link-layer address of Ethernet.
type MAC [6]byte
