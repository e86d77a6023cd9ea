package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/landfall-lb/landfall/api/v1beta1"
)

// Client-side limits of requests per second and of a burst. Watches do not count.
const (
	qps   = 100
	burst = 200
	// Of Events, which have limits of their own, so that they never hold up anything.
	eventQPS   = 50
	eventBurst = 100
)

// Options say how to reach the API server, and as whom.
type Options struct {
	// Kubeconfig is a file; empty means the pod's service account.
	Kubeconfig string
	// Servers are more addresses of the API server, host:port, that are tried when the configured one
	// does not answer within a second.
	Servers []string
	// UserAgent names the program in the API server's logs, and the field manager of what it writes.
	UserAgent string
	Log       *slog.Logger
	// QPS and Burst limit requests per second; 100 and 200 if zero.
	QPS   float32
	Burst int
	// Fold has events that keep coming read together; the zero value does not.
	Fold Fold
	// User, if set, is read in place of Kubeconfig, in the way that kubectl reads it.
	User *UserConfig
}

// UserConfig selects a cluster and a user as kubectl's flags do. Its zero value selects what
// kubectl without flags uses: the merged files in $KUBECONFIG, else ~/.kube/config, else the
// service account of the pod.
type UserConfig struct {
	Kubeconfig, Context string
	// Cluster and User are names of entries of the kubeconfig; empty: those of the context.
	Cluster, User string
	// Namespace is that of names without one; empty: the context's, else "default".
	Namespace string
	// As and AsGroups are a user and groups to impersonate; empty: nobody.
	As       string
	AsGroups []string
}

// loader reads the files when it is asked.
func (u UserConfig) loader() clientcmd.ClientConfig {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = u.Kubeconfig
	overrides := &clientcmd.ConfigOverrides{CurrentContext: u.Context}
	overrides.Context.Namespace = u.Namespace
	overrides.Context.Cluster, overrides.Context.AuthInfo = u.Cluster, u.User
	overrides.AuthInfo.Impersonate, overrides.AuthInfo.ImpersonateGroups = u.As, u.AsGroups
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides)
}

// DefaultNamespace returns the namespace of names without one.
func (u UserConfig) DefaultNamespace() (string, error) {
	namespace, _, err := u.loader().Namespace()
	if err != nil {
		return "", fmt.Errorf("kubeconfig: %w", err)
	}
	return namespace, nil
}

// Contexts returns the names of the contexts, in order.
func (u UserConfig) Contexts() ([]string, error) {
	config, err := u.loader().RawConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	return slices.Sorted(maps.Keys(config.Contexts)), nil
}

// Client reads and writes one API server. Register watches first, then call Run.
type Client struct {
	log       *slog.Logger
	host      string
	userAgent string
	core      kinds
	events    kinds // the same with limits for Events
	// rest and landfall are what is watched, with a Fold over a connection of its own.
	rest     *restKinds
	landfall rest.Interface
	config   *rest.Config
	http     *http.Client
	dialer   *dialer

	mu      sync.Mutex
	watches []*watch
	onSync  []func()
	nodes   func() int // how many the cluster has, as far as this client watches all of them; may be nil
}

// Size returns how many nodes the cluster has; 0 if that is not known.
func (c *Client) Size() int {
	c.mu.Lock()
	nodes := c.nodes
	c.mu.Unlock()
	if nodes == nil {
		return 0
	}
	return nodes()
}

// Connect reads the configuration and returns a client; it sends nothing yet.
func Connect(o Options) (*Client, error) {
	klog.SetSlogLogger(o.Log)
	config, dialer, err := restConfig(o)
	if err != nil {
		return nil, err
	}
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	core, err := newKinds(config, httpClient)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	watching := httpClient
	if o.Fold.Every > 0 {
		if watching, err = rest.HTTPClientFor(newFolding(o.Fold).config(config)); err != nil {
			return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
		}
	}
	watched, err := newKinds(config, watching)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	forEvents := rest.CopyConfig(config)
	forEvents.QPS, forEvents.Burst = eventQPS, eventBurst
	events, err := newKinds(forEvents, httpClient)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	landfall, err := landfallClient(config, watching)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	return &Client{log: o.Log, host: config.Host, userAgent: o.UserAgent, core: core, events: events,
		rest: watched, landfall: landfall, config: config, http: httpClient, dialer: dialer}, nil
}

func restConfig(o Options) (*rest.Config, *dialer, error) {
	var config *rest.Config
	var err error
	if o.User != nil {
		if config, err = o.User.loader().ClientConfig(); clientcmd.IsEmptyConfig(err) {
			if files := os.Getenv(clientcmd.RecommendedConfigPathEnvVar); files != "" && o.User.Kubeconfig == "" {
				return nil, nil, fmt.Errorf("no kubeconfig: $KUBECONFIG is %q, and these files are empty or not there", files)
			}
			return nil, nil, errors.New("no kubeconfig: give --kubeconfig or set KUBECONFIG; ~/.kube/config has none, " +
				"and this is no pod")
		} else if err != nil {
			return nil, nil, fmt.Errorf("kubeconfig: %w", err)
		}
	} else if o.Kubeconfig == "" {
		if config, err = rest.InClusterConfig(); err != nil {
			return nil, nil, fmt.Errorf("no --kubeconfig given and not in a pod: %w", err)
		}
	} else if config, err = clientcmd.BuildConfigFromFlags("", o.Kubeconfig); err != nil {
		return nil, nil, fmt.Errorf("--kubeconfig %s: %w", o.Kubeconfig, err)
	}
	config.UserAgent = o.UserAgent
	config.QPS, config.Burst = cmp.Or(o.QPS, qps), cmp.Or(o.Burst, burst)
	if err := checkServers(o.Servers); err != nil {
		return nil, nil, fmt.Errorf("--api-servers: %w", err)
	}
	dialer, err := dialThrough(config, o.Log, o.Servers)
	if err != nil {
		return nil, nil, err
	}
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	return config, dialer, nil
}

// landfallClient speaks JSON, as the API server has no other encoding for custom resources that we
// could use.
func landfallClient(config *rest.Config, httpClient *http.Client) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := v1beta1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	config = rest.CopyConfig(config)
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	config.APIPath = "/apis"
	config.GroupVersion = &v1beta1.GroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientForConfigAndClient(config, httpClient)
}

// Config returns how the client reaches the API server, for clients of client-go that share its
// connection.
func (c *Client) Config() (*rest.Config, *http.Client) { return rest.CopyConfig(c.config), c.http }

// Host returns the address of the API server.
func (c *Client) Host() string { return c.host }

// Servers returns the addresses by which the client was told to reach the API server. One that is a name has
// none.
func (c *Client) Servers() []netip.Addr { return c.dialer.addresses() }

// OnSync has f called each time after a full list of some kind has arrived, or was refused. Call it
// before Run.
func (c *Client) OnSync(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onSync = append(c.onSync, f)
}

func (c *Client) synced() {
	c.mu.Lock()
	onSync := c.onSync
	c.mu.Unlock()
	for _, f := range onSync {
		f()
	}
}

// answered has a refusal count as an answer, for who waits for a list.
func (c *Client) answered(err error) {
	if apierrors.IsForbidden(err) {
		c.synced()
	}
}

// Refused returns what the API server does not let this user read, by the plural name, and why.
func (c *Client) Refused() map[string]error {
	c.mu.Lock()
	defer c.mu.Unlock()
	refused := map[string]error{}
	for _, w := range c.watches {
		if err := w.refusal(); err != nil {
			refused[w.resource] = err
		}
	}
	return refused
}

// Trouble says in one line why lists may be missing: the API server cannot be connected to, or does not let this
// user read something; "" if there is nothing.
func (c *Client) Trouble() string {
	if err := c.Unreachable(); err != nil {
		return strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	refused := c.Refused()
	kinds := slices.Sorted(maps.Keys(refused))
	switch len(kinds) {
	case 0:
		return ""
	case 1:
		return refused[kinds[0]].Error()
	}
	return fmt.Sprintf("%v; and %d more kinds", refused[kinds[0]], len(kinds)-1)
}

// Busy returns for how long a watch has been handing on what it has heard.
func (c *Client) Busy() time.Duration {
	c.mu.Lock()
	watches := c.watches
	c.mu.Unlock()
	var longest time.Duration
	for _, w := range watches {
		longest = max(longest, w.pulse.Busy())
	}
	return longest
}

// Run keeps all registered tables up to date until ctx ends. While the API server cannot be
// reached, the tables keep what they hold.
func (c *Client) Run(ctx context.Context) error {
	c.mu.Lock()
	watches := c.watches
	c.mu.Unlock()
	var group errgroup.Group
	for _, w := range watches {
		group.Go(func() error {
			w.run(ctx)
			return nil
		})
	}
	return group.Wait()
}
